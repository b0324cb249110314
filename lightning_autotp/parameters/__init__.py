"""What a parallel model knows of its parameters and the original ones, and making them whole again."""
