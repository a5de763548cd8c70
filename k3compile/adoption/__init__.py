"""Other people's models: their KDA functions computed by k3 ops, on one model instance, source untouched."""
