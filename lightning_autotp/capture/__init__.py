"""From a model to a graph: one trace on the meta device."""
