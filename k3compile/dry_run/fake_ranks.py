"""A process group of any size in one process: nothing is sent, so that any rank's graph can be made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ..runtime.parallel.ranks import Ranks, world


@contextmanager
def fake_ranks(rank: int, size: int, context: int = 1) -> Iterator[Ranks]:
    """Inside, this process is ``rank`` of ``size``, in context groups of ``context``; afterwards of no group.

    Raises ValueError for a rank that does not exist, and in a process that has a group already, which would
    have to be taken from whoever uses it.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank is {rank}, and {size} ranks are numbered 0 to {size - 1}")
    if dist.is_initialized():
        raise ValueError(
            "a dry run makes process groups of its own, and this process is in one already: "
            "run it in another process, as `k3 dry-run` does"
        )
    dist.init_process_group(dist.Backend.FAKE, store=FakeStore(), rank=rank, world_size=size)
    try:
        yield world(context)
    finally:
        dist.destroy_process_group()
