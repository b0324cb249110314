"""Optional: optimizers that need whole matrices, each stepped on one rank."""
