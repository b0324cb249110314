"""What a training step of a plan takes: memory and time on a GPU, and which plan fits which machine."""
