"""Models without memory: recorded initialization, and tensors of checkpoint files that are read later."""
