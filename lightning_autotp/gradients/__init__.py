"""Gradients of a parallel model: sums over the ranks, norms, and what is a part of a whole one."""
