"""The tensor-parallel group and what its ranks have in common: agreement, random numbers, watching one another."""
