"""A process group of any size in one process: for graphs, whose shapes and choices need no other rank.

with pretended_group(8, rank=3) as name: ...     torch's no-op backend; results are not sums
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d


@contextmanager
def pretended_group(ranks: int, rank: int = 0, name: str = "pretended") -> Iterator[str]:
    """The name of a group of ``ranks``, this process being ``rank``; the default group stays as it is."""
    made = c10d.ProcessGroup(dist.HashStore(), rank, ranks)
    backend = c10d.FakeProcessGroup._create_internal(rank, ranks, None)
    kind = c10d.ProcessGroup.BackendType.CUSTOM
    made._set_default_backend(kind)
    made._register_backend(torch.device("cpu"), kind, backend)
    made._set_group_name(name)
    c10d._register_process_group(name, made)
    try:
        yield name
    finally:
        c10d._unregister_process_group(name)
