"""Optimizers of a parallel model: the steps they make, trials of them on small tensors, loss scaling."""
