"""Which of the ranks that share a model this process is; one process is a group of one.

    tensor parallel, 8 ranks      0 1 2 3 4 5 6 7      heads, inner columns and vocabulary are split over all
    context groups of 4           [0 1 2 3][4 5 6 7]   the latent rows of a token live on one rank of each

A group of one keeps the plain model's graph the same on one rank and on eight: its sums are removed while
lowering. For it torch's no-op backend is exact, since one rank's sum is what that rank gave. Gloo would do as
well, but listens on a socket and keeps four threads even when it is alone (torch 2.13).
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch.distributed as dist
from k3compile.kernels.groups import ranks_of
from torch._C._distributed_c10d import _register_process_group
from torch.testing._internal.distributed import fake_pg  # registers the no-op backend


class Ranks(NamedTuple):
    """This rank among ``size`` that share every layer, in the process group named ``group``.

    context: ranks over which the latent rows of a text are dealt out, 1 where each keeps them all; they are
    neighbours, and ``context_group`` is the name of their process group, the same one in all of them.
    """

    rank: int
    size: int
    group: str
    context: int = 1
    context_group: str = ""

    @property
    def context_rank(self) -> int:
        """This rank's place in its context group."""
        return self.rank % self.context

    def share(self, total: int) -> int:
        """What one rank has of ``total`` equal parts, which are refused at the start if they cannot be dealt
        out evenly (sharding.py).
        """
        assert total % self.size == 0, f"{total} parts over {self.size} ranks"
        return total // self.size


def world(context: int = 1) -> Ranks:
    """All ranks of the default process group, which is made here as a group of one if there is none.

    context: ranks of a context group; every rank must ask for the same, since their groups are made here.
    Raises ValueError when a launcher started several processes that have not met yet (a group of one in each
    of them would compute a different model without a word), and for a context that does not divide the ranks.
    """
    name = group()
    rank, size = dist.get_rank(), dist.get_world_size()
    if context < 1 or size % context:
        raise ValueError(f"context groups of {context} ranks do not divide {size} ranks")
    if context == 1:
        return Ranks(rank, size, name)
    if context == size:
        return Ranks(rank, size, name, context, name)
    own = f"context_of_{context}"  # its own number would differ between groups, and with it the graphs
    if ranks_of(own) is None:
        for first in range(0, size, context):  # every rank takes part in making every group
            made = dist.new_group(range(first, first + context))
            if first <= rank < first + context:
                _register_process_group(own, made)
    return Ranks(rank, size, name, context, own)


def group() -> str:
    """Name of the default process group; see :func:`world`."""
    if not dist.is_initialized():
        size = os.environ.get("WORLD_SIZE", "1")
        if size != "1":
            raise ValueError(
                f"WORLD_SIZE is {size} but torch.distributed is not initialised: call "
                "torch.distributed.init_process_group before the model is built"
            )
        dist.init_process_group(dist.Backend.FAKE, store=fake_pg.FakeStore(), rank=0, world_size=1)
    return dist.group.WORLD.group_name
