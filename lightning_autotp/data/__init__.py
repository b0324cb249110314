"""Batches of a parallel model: every tensor-parallel rank has the same."""
