"""Proving by a second trace that the local model is the same computation, and finding the sizes that make it so."""
