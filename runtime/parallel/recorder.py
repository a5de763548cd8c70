"""Every collective of this rank in the order of its calls, and one number for all of them.

    torch.ops._c10d_functional.all_reduce --+   plain code, what a compiler generates, opaque ops
    torch.distributed.broadcast ------------+--> c10d::allreduce_, c10d::broadcast_, ... --> recorder, gloo
                                                 ops of torch's dispatcher; every way leads through them

Ranks that make the same calls have the same :class:`Mark`. One that made another has not: then the lists say
where they part. A call is written down before it is made, so the last of a list is what a rank is stuck in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

KEPT = 1024  # calls in the list: three steps of the released model
ODD = 0x5851F42D4C957F2D  # multiplies the digest, so that the order counts
BITS63 = (1 << 63) - 1  # fits an int64 that is not negative
# Calls that have the same arguments on all ranks of a group; those of send, recv, gather and scatter differ.
HEARD = (
    "allreduce_",
    "allreduce_coalesced_",
    "broadcast_",
    "reduce_",
    "allgather_",
    "_allgather_base_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "reduce_scatter_",
    "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
    "alltoall_base_",
    "barrier",
)


class Mark(NamedTuple):
    """How many collectives there were, and a 63-bit digest of them in their order."""

    count: int
    digest: int


class Entry(NamedTuple):
    """A call. place: how many came before it. text: op, tensors and ranks of its group."""

    place: int
    text: str


class Recorder:
    """The list of one rank's collectives: its last ``kept`` in full, all of them in the digest."""

    def __init__(self, kept: int = KEPT) -> None:
        self._last: deque[tuple] = deque(maxlen=kept)
        self._mark = Mark(0, 0)

    def add(self, op: str, tensors: tuple, ranks: int) -> None:
        """Write a call down. tensors: (shape, dtype) of each argument; ranks: how many take part."""
        call = (op, tensors, ranks)
        count, digest = self._mark
        self._last.append(call)
        self._mark = Mark(count + 1, (digest * ODD + number(call)) & BITS63)

    def mark(self) -> Mark:
        """Where this rank is."""
        return self._mark

    def entries(self) -> list[Entry]:
        """The last calls, oldest first. Thread-safe."""
        last, count = list(self._last), self._mark.count
        return [Entry(count - len(last) + i, text_of(call)) for i, call in enumerate(last)]


@contextmanager
def hearing(recorder: Recorder) -> Iterator[Recorder]:
    """Inside, ``recorder`` hears every collective of this process, of whichever thread. One at a time.

    A call costs 10 to 20 microseconds more.
    """
    library = torch.library.Library("c10d", "IMPL")
    try:
        for name in HEARD:
            library.impl(name, listener(name, recorder), "BackendSelect", with_keyset=True)
        yield recorder
    finally:
        library._destroy()


def listener(name: str, recorder: Recorder) -> Any:
    """A kernel before the real one: "BackendSelect" comes first whatever the device, and is free here."""
    op = getattr(torch.ops.c10d, name).default
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def heard(keys: Any, *arguments: Any, **named: Any) -> Any:
        tensors, ranks = told_by(arguments)
        recorder.add(name, tensors, ranks)
        return op.redispatch(keys & below, *arguments, **named)

    return heard


def told_by(arguments: Sequence[Any]) -> tuple[tuple, int]:
    """(shape, dtype) of each tensor, in lists too, and the ranks of the group."""
    tensors: list[tuple] = []
    ranks = 0
    for one in arguments:
        if isinstance(one, Tensor):
            tensors.append((one.shape, one.dtype))
        elif isinstance(one, list):
            tensors += told_by(one)[0]
        elif not ranks and isinstance(one, torch.ScriptObject):  # the group comes before other such objects
            ranks = dist.ProcessGroup.unbox(one).size()
    return tuple(tensors), ranks


def text_of(call: tuple) -> str:
    """``allreduce_ [16, 128] float32 over 8``"""
    op, tensors, ranks = call
    shapes = ", ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in tensors)
    return f"{op} {shapes} over {ranks}"


@lru_cache(maxsize=1 << 14)
def number(call: tuple) -> int:
    """63 bits of a call, the same in every process."""
    return int.from_bytes(blake2b(text_of(call).encode(), digest_size=8).digest(), "big") & BITS63
