"""Optional: files of one process's format, for transformers and PEFT."""
