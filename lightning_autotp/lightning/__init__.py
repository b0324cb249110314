"""The Lightning strategy, and what else knows Lightning."""
