"""kda_prefill that also leaves the state of a row at a token inside it: a checkpoint without a second pass.

    a row, its chunks    |0 .......... 63|64 ........ 127|128 ....... 191|..
    offset 128                                           ^ the state before chunk 2, copied on the way
    offset 150                                           ^-----150 the same copy, then 22 tokens more

Off the chunk grid the rest is run as a row of its own that lives in the export slot: the work of one chunk,
and the arithmetic of a run that stops there. T token rows, R requests, H heads, K and V channels, S slots,
N export entries (:mod:`exports`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from .exports import Export, exports_of
from .kda import Step, forward, kda_samples, one_step, whole_rows
from .kda_chunk import BLOCK_ELEMENTS, CHUNK, SUB, Inputs
from .op import op


@op(writes=("state",), opaque=True)
def kda_prefill_export(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    cu: Tensor,
    export_offset: Tensor,
    export_slot: Tensor,
) -> Tensor:
    """kda_prefill, bit for bit, and checkpoints: state[export_slot[i]] of row i at export_offset[i] tokens.

    export_offset, export_slot [N] int32, offset 0 for none. On the chunk grid (offsets of 64 from the start
    of the row) and at the end of a row a checkpoint has the bits of a run that stops there; elsewhere it
    equals one up to rounding. Raises ValueError, before anything is written, for what
    :func:`exports.exports_of` refuses.
    """
    out = v.new_zeros(v.shape)
    forward_export(Inputs(q, k, v, g, beta), state, slots, cu, export_offset, export_slot, out, 0)
    return out


@kda_prefill_export.fake
def _(q, k, v, g, beta, state, slots, cu, export_offset, export_slot) -> Tensor:
    return v.new_empty(v.shape)


@kda_prefill_export.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    cases = {
        (): (),
        (0, 1): (0, 1),
        (1, 1, 1): (1, 0, 1),
        (5, 0, 1, 70): (4, 0, 0, 64),
        (130, 64): (66, 64),
        (17,): (1,),
    }
    for args, offsets in zip(kda_samples(dtype, tuple(map(list, cases))), cases.values()):
        yield *args, *export_columns(offsets, args[6], len(args[5]))


def export_columns(offsets: tuple[int, ...], slots: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Both columns, two entries longer than the rows; the slots are among the ``count`` nobody lives in."""
    free = [slot for slot in range(1, count) if slot not in slots.tolist()]
    places = [free.pop() if offset else 0 for offset in offsets]
    columns = [torch.tensor([*column, 0, 0], dtype=torch.int32) for column in (offsets, places)]
    return columns[0], columns[1]


@op(writes=("state", "out"), opaque=True)
def kda_prefill_export_into(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    cu: Tensor,
    export_offset: Tensor,
    export_slot: Tensor,
    out: Tensor,
    start: int,
) -> None:
    """kda_prefill_export, its results written to rows [start, start + cu[-1]) of out(b!) [T2, H, V]."""
    forward_export(Inputs(q, k, v, g, beta), state, slots, cu, export_offset, export_slot, out, start)


@kda_prefill_export_into.fake
def _(q, k, v, g, beta, state, slots, cu, export_offset, export_slot, out, start) -> None:
    return None


@kda_prefill_export_into.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    for args in kda_samples(dtype, ([], [1], [3, 1, 40])):
        v, offsets = args[2], (2, 0, 33)[: len(args[6])]
        columns = export_columns(offsets if len(offsets) > 1 else (1,) * len(offsets), args[6], len(args[5]))
        yield *args, *columns, v.new_full((len(v) + 5, *v.shape[1:]), 7.0), 2


def forward_export(
    inputs: Inputs,
    state: Tensor,
    slots: Tensor,
    cu: Tensor,
    export_offset: Tensor,
    export_slot: Tensor,
    out: Tensor,
    start: int,
    step: Step = one_step,
) -> None:
    """forward, with the checkpoints of the rows that leave one."""
    bounds = cu.tolist()
    exports = exports_of(export_offset, export_slot, slots, bounds, len(state))
    if not exports:
        return forward(inputs, state, slots, bounds, out, start, step=step)
    lengths = [end - begin for begin, end in pairwise(bounds)]
    inside = {e.row: e for e in exports if e.offset < lengths[e.row]}

    def watch(rows: list[int]) -> Copier | None:
        wanted = [(inside[row], place) for place, row in enumerate(rows) if row in inside]
        return Copier(wanted, state) if wanted else None

    forward(inputs, state, slots, bounds, out, start, watch if inside else None, step)
    for e in exports:
        if e.row not in inside:
            state[e.slot] = state[slots[e.row]]
    rest(inputs, state, [e for e in inside.values() if e.offset % CHUNK], bounds, step)


class Copier:
    """Called before each chunk of some rows: copies the states that lie at a checkpoint's last grid point."""

    def __init__(self, wanted: list[tuple[Export, int]], state: Tensor) -> None:
        self.wanted, self.state, self.chunk = wanted, state, 0

    def __call__(self, states: list[Tensor]) -> None:
        heads = self.state.shape[1]
        for export, place in self.wanted:
            if export.offset // CHUNK == self.chunk:
                part = slice(place * heads, (place + 1) * heads)  # of the copy that holds all rows
                self.state[export.slot] = states[place] if len(states) > 1 else states[0][part]
        self.chunk += 1


def rest(inputs: Inputs, state: Tensor, exports: list[Export], bounds: list[int], step: Step) -> None:
    """Run the tokens between the last grid point and the offset, in the export slots, as a cut run would."""
    by_size = {1: [], SUB: [], CHUNK: []}
    for e in exports:
        by_size[1 if e.offset == 1 else SUB if e.offset <= SUB else CHUNK].append(e)
    width = state.shape[1] * state.shape[3]
    for size, some in by_size.items():
        together = max(1, BLOCK_ELEMENTS // (size * width))
        for at in range(0, len(some), together):
            part = some[at : at + together]
            slots = [e.slot for e in part]
            begins = [bounds[e.row] + e.offset // CHUNK * CHUNK for e in part]
            if size == 1:
                step(inputs, state, slots, begins, None, 0)
            else:
                whole_rows(inputs, state, slots, begins, [e.offset % CHUNK for e in part], size, None, 0)
