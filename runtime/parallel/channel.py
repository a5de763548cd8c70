"""How a command travels: one broadcast of a fixed size, and a second one where a command is longer.

    FIRST numbers    [ command ............ | zeros ]       every command
    the others       [ command, from FIRST on ]             only where its head says that there are more

The group is one of the CPU's own, so that a plan touches no device and waits behind nothing that runs there.
A follower waits in the first broadcast for as long as rank 0 has nothing to do, which may be days: its time
limit is as good as none. That a rank is gone shows in the broadcast, that it stands still is for its watch.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from .wire import length_of

FIRST = 4096
FOREVER = timedelta(days=365)


class Channel:
    """From rank 0 of ``group`` to the others; ``group`` None: the default group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def send(self, numbers: Tensor) -> None:
        """Broadcast a command [numbers] int64; on rank 0."""
        first = numbers.new_zeros(FIRST)
        first[: len(numbers)] = numbers[:FIRST]
        self._broadcast(first)
        if len(numbers) > FIRST:
            self._broadcast(numbers[FIRST:].contiguous())

    def receive(self) -> Tensor:
        """The next command, on the other ranks. Raises :class:`wire.Malformed` for what is none."""
        first = torch.empty(FIRST, dtype=torch.int64)
        self._broadcast(first)
        length = length_of(first)
        if length <= FIRST:
            return first[:length]
        rest = torch.empty(length - FIRST, dtype=torch.int64)
        self._broadcast(rest)
        return torch.cat([first, rest])

    def _broadcast(self, numbers: Tensor) -> None:
        dist.broadcast(numbers, 0, self.group)


def open_channel() -> Channel:
    """A channel over all ranks of the default group, on a gloo group of its own. Every rank must call it."""
    return Channel(dist.new_group(backend="gloo", timeout=FOREVER))
