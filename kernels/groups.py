"""Process groups by the name that stands in a graph: how many ranks one has, and which this process is.

A graph holds the name alone, so that it is the same on every rank; its place a rank looks up when it runs.
"""

from __future__ import annotations

from torch.distributed.distributed_c10d import _resolve_process_group


def ranks_of(group: object) -> int | None:
    """Ranks of a process group; None for an unknown name."""
    try:
        return _resolve_process_group(group).size()
    except (LookupError, RuntimeError):
        return None


def place_in(group: str) -> tuple[int, int]:
    """This process's rank in a group, and the group's size. Raises what torch does for an unknown name."""
    found = _resolve_process_group(group)
    return found.rank(), found.size()
