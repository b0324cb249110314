"""Whether a parallel model is still what was proved: everything that is checked around each use of it."""
