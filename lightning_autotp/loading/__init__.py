"""Weights of a parallel model: each rank reads its own blocks."""
