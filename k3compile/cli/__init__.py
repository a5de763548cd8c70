"""The `k3` command, one file per verb."""
