"""KDA rows of several tokens in C++ on a CPU, chunk by chunk; cpu/kda_chunk.cpp has the picture.

The grid of 64 and the meaning's formulas, a head of a row at a time; so a row's bits depend on its own tokens
alone. Checkpoints anywhere inside a row have the bits of a run that stops there.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

from torch import Tensor

from .kda_chunk import Inputs
from .native import best_isa, library, threads, unavailable, unwritten

POINTER, INT = ctypes.c_void_p, ctypes.c_int64


class Row(NamedTuple):
    """A row of several tokens. Its state after ``offset`` of them, 0 for never, goes to slot ``into``; where
    states are only read ``into`` is the slot of the row's records.
    """

    slot: int
    begin: int
    count: int
    offset: int = 0
    into: int = 0


def cannot() -> str | None:
    """Why whole rows are better left to the meaning on this CPU, or None; may compile the kernel.

    Its products are torch's, which are as fast as four lanes without fused multiply-add, and more exact.
    """
    return "vectors of four lanes gain nothing" if best_isa() == "portable" else unavailable("kda_chunk")


@functools.cache
def function(isa: str | None) -> ctypes._CFuncPtr:
    """The kernel of the library for ``isa``."""
    kernel = library("kda_chunk", isa).k3_kda_rows
    kernel.argtypes, kernel.restype = [*[POINTER] * 4, INT], None
    return kernel


def whole_rows(
    inputs: Inputs,
    state: Tensor,
    rows: list[Row],
    out: Tensor,
    start: int,
    records: tuple[Tensor, ...] = (),
    isa: str | None = None,
) -> None:
    """Rows in their slots, which are all different, float32; outputs to token rows ``start`` on of out.

    state: key channels side by side. records [N, J, H, *]: u, or u, k and g, of each row go there, and no
    state moves. isa: an instruction set (default: this CPU's best).
    """
    if not rows:
        return
    ready = [x if x.dim() == 2 or x.stride(2) == 1 else x.contiguous() for x in inputs]
    target = out if out.stride(2) == 1 else out.contiguous()
    into = [r if r.stride(3) == 1 else r.contiguous() for r in records]
    data = [x.data_ptr() for x in (*ready, target, state, *into)] + [None] * (3 - len(into))
    strides = [n for x in (*ready, target) for n in x.stride()[:2]]
    strides += [n for x in (state, *into) for n in x.stride()[:3]] + [0, 0, 0] * (3 - len(into))
    rows = sorted(rows, key=lambda row: -row.count)  # the last to be handed out are the shortest
    unwritten()
    function(isa)(
        (POINTER * 10)(*data),
        (INT * 24)(*strides),
        (INT * 5)(len(rows), *state.shape[1:2], state.shape[3], state.shape[2], start),
        (INT * (5 * len(rows)))(*(n for row in rows for n in row)),
        threads(),
    )
    give_back(rows, target, out, start)
    for made, given in zip(into, records):
        if made is not given:
            for row in rows:
                given[row.into, : row.count] = made[row.into, : row.count]


def give_back(rows: list[Row], target: Tensor, out: Tensor, start: int) -> None:
    """The rows of ``out`` that were made in a copy of it."""
    if target is not out:
        for row in rows:
            part = slice(row.begin + start, row.begin + row.count + start)
            out[part] = target[part]
