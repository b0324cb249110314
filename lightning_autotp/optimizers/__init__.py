"""Optimizers of a parallel model: whether they may step parts, and those that need whole matrices."""
