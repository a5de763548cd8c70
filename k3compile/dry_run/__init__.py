"""A model of any size on any number of ranks, compiled without its weights, and what a step of it costs."""
