"""State of a parallel model in the original model's names and shapes, and files of it."""
