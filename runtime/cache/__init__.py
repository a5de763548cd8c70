"""Latent pages and KDA state, owned together."""
