"""A training step of this project beside those of its peers: see ``compare.py``."""
