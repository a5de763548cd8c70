"""Arguments of a call, laid out anew: each storage is copied into a larger one, whose other elements are NaN.

    given    [q q q|k k k|q q q|k k k]        one storage, two arguments
    room     [. . . q q q|k k k|q q q|k k k . . .]        . is NaN, and has to be NaN afterwards

Views keep their strides and what they share. Integers are copied as they are: what an index must not be
depends on the op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.jit_triton import VECTOR

GUARD = 128  # elements before and after, a multiple of every alignment


@dataclass
class Room:
    """A storage, which of its elements no argument has, and what it held when the call began."""

    memory: Tensor  # [N]
    others: Tensor  # [N] bool
    before: Tensor  # [N] bits

    def disturbed(self) -> int:
        """Elements that are nobody's and have changed."""
        return int(((bits(self.memory) != self.before) & self.others).sum())


def bits(x: Tensor) -> Tensor:
    """The same memory as integers, so that NaN equals itself; a copy."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.detach().clone().contiguous().view(kinds[x.element_size()])


def moved_in(
    args: Sequence[Any], device: torch.device | str = "cpu", wide: bool = False
) -> tuple[list[Any], list[Room]]:
    """Arguments of the same values and strides on ``device``, and the rooms they are in.

    wide: every float as float64. Arguments that are no tensors stay as they are.
    """
    rooms: dict[Any, Room] = {}
    made = []
    for arg in args:
        if not isinstance(arg, Tensor):
            made.append(arg)
            continue
        room = rooms.setdefault(storage_of(arg), room_for(arg, device, wide))
        own = room.memory.as_strided(arg.shape, arg.stride(), arg.storage_offset() + GUARD)
        places = torch.arange(len(room.memory), device=device)
        room.others[places.as_strided(own.shape, own.stride(), own.storage_offset()).flatten()] = False
        made.append(own)
    for room in rooms.values():
        if room.memory.is_floating_point():
            room.memory[room.others] = torch.nan
        room.before = bits(room.memory)
    return made, list(rooms.values())


def storage_of(x: Tensor) -> Any:
    """What two tensors that share memory have in common; empty ones share none."""
    return (x.untyped_storage().data_ptr(), x.dtype) if x.numel() else id(x)


def room_for(x: Tensor, device: torch.device | str, wide: bool) -> Room:
    """The whole storage of ``x`` with a guard on either side."""
    count = x.untyped_storage().nbytes() // x.element_size()
    flat = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage(), 0, (count,), (1,))
    dtype = torch.float64 if wide and x.is_floating_point() else x.dtype
    memory = torch.zeros(count + 2 * GUARD, dtype=dtype, device=device)
    memory[GUARD : GUARD + count] = flat.to(device=device, dtype=dtype)
    return Room(memory, torch.ones_like(memory, dtype=torch.bool), bits(memory))


def aligned(args: Sequence[Any]) -> list[Any]:
    """The same values with every row of floats at a multiple of 16 bytes; tensors that are so already stay,
    and so do integers: packed weights have no gaps.
    """
    floats = [isinstance(a, Tensor) and a.is_floating_point() for a in args]
    return [with_aligned_rows(a) if is_float else a for a, is_float in zip(args, floats)]


def with_aligned_rows(x: Tensor) -> Tensor:
    steps = [x.storage_offset(), *x.stride()[:-1]]
    if x.dim() < 2 or not any(step * x.element_size() % VECTOR for step in steps):
        return x
    whole = VECTOR // x.element_size()
    padded = x.new_zeros(*x.shape[:-1], -(-x.shape[-1] // whole) * whole)[..., : x.shape[-1]]
    return padded.copy_(x)
