"""What the device forgets, kept on the host and on disk: pages and states by the hash of their prefix."""
