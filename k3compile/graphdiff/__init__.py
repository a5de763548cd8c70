"""Comparing graphs: everything here works on JSON snapshots (``k3graph/1``) and imports no torch."""
