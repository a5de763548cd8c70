"""Whether a model fits on some GPUs, and what then fits beside it: from its configuration alone."""
