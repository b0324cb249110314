"""From a graph to a plan: candidates, prices, the solver."""
