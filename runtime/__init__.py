"""Serving: model, weights, scheduler, cache, engine, server."""
