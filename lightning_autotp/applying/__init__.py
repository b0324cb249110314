"""Executing a plan: the model becomes this rank's smaller model."""
