"""Weights, gradients, data and optimizers of a parallel model, without Lightning."""
