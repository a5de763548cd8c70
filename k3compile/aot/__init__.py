"""Ahead of time: every Triton kernel compiled for GPUs that are not here, and what came out."""
