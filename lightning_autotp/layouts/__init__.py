"""How tensors lie over the ranks, where that may change, and the plan that says so: plain data, no torch."""
