"""Graph in, graph out: the passes and what runs them."""
