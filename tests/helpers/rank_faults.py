"""Faults of one rank, for a check that serving over ranks shows them: each is a job like serve_way."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import torch
import torch.distributed as dist
from k3compile.runtime import attention
from k3compile.runtime.cache.orders import Poison
from k3compile.runtime.executor import Executor
from rank_serving import Seen, Way, serve_way
from rank_traffic import Known


def rounds_otherwise(way: Way, known: Sequence[Known]) -> Seen:
    """Rank 1 adds a little to its part of every attention."""
    summed = attention.all_reduce

    def off(x: torch.Tensor, group: str) -> torch.Tensor:
        return summed(x * (1 + 1e-6 * dist.get_rank()), group)

    with mock.patch.object(attention, "all_reduce", off):
        return serve_way(way, known)


def forgets_to_poison(way: Way, known: Sequence[Known]) -> Seen:
    """Rank 1 leaves in its pools what was freed."""
    write = Executor.write

    def partly(self: Executor, changes: Sequence) -> None:
        mine = dist.get_rank() == 1
        write(self, [change for change in changes if not (mine and isinstance(change, Poison))])

    with mock.patch.object(Executor, "write", partly):
        return serve_way(way, known)


def sums_once_more(way: Way, known: Sequence[Known]) -> Seen:
    """Both ranks make one collective more, of which rank 1's has another shape."""
    run = Executor.run

    def more(self: Executor, *arguments: object) -> object:
        dist.broadcast(torch.zeros((4,) if dist.get_rank() else (2, 2)), 0)
        return run(self, *arguments)

    with mock.patch.object(Executor, "run", more):
        return serve_way(way, known)
