"""Several ranks that serve one model: who they are, what each holds, how they agree and fail."""
