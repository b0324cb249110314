"""From a model to a graph: one trace without values."""
