"""What is used of other libraries that they do not promise to keep: one module for each, with what for."""
