"""What a parameter of a parallel model knows of the original one, and making it whole again."""
