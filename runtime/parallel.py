"""The process group of the model's sums over ranks; one process is a group of one.

A group of one keeps the plain model's graph the same on one rank and on eight: its sums are removed while
lowering. For it torch's no-op backend is exact, since one rank's sum is what that rank gave. Gloo would do as
well, but listens on a socket and keeps four threads even when it is alone (torch 2.13).
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed import fake_pg  # registers the no-op backend


def group() -> str:
    """Name of the default process group, made here as a group of one if there is none.

    Raises ValueError when a launcher started several processes that have not met yet: a group of one in
    each of them would compute a different model without a word.
    """
    if not dist.is_initialized():
        world = os.environ.get("WORLD_SIZE", "1")
        if world != "1":
            raise ValueError(
                f"WORLD_SIZE is {world} but torch.distributed is not initialised: call "
                "torch.distributed.init_process_group before the model is built"
            )
        dist.init_process_group(dist.Backend.FAKE, store=fake_pg.FakeStore(), rank=0, world_size=1)
    return dist.group.WORLD.group_name


def world_size() -> int:
    """Ranks in that group."""
    group()
    return dist.get_world_size()


def all_reduce(x: Tensor, group: str) -> Tensor:
    """The sum of every rank's ``x``, as a new tensor; two nodes in a graph: all_reduce and wait_tensor."""
    total = torch.ops._c10d_functional.all_reduce(x, "sum", group)
    return torch.ops._c10d_functional.wait_tensor(total)
