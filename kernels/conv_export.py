"""short_conv that also leaves the window of a row at a token inside it, beside kda_prefill_export's state.

    a row with its window     w w w x0 x1 x2 x3 x4 ..
    offset 1                    '---'                     old rows where the offset is less than three
    offset 4                             '-----'

T token rows, C channels, S slots, R requests, N export entries (:mod:`exports`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .conv import KEPT, conv_samples, short_conv
from .exports import exports_of
from .kda_export import export_columns
from .op import op


@op(writes=("window",), opaque=True)
def short_conv_export(
    x: Tensor,
    weight: Tensor,
    window: Tensor,
    slots: Tensor,
    cu: Tensor,
    export_offset: Tensor,
    export_slot: Tensor,
) -> Tensor:
    """short_conv, bit for bit, and the window of row i after export_offset[i] tokens in export_slot[i].

    export_offset, export_slot [N] int32, offset 0 for none. The rows are copied, so a checkpoint is exact at
    every offset. Raises ValueError, before anything is written, for what :func:`exports.exports_of` refuses.
    """
    bounds = cu.tolist()
    for row, offset, slot in exports_of(export_offset, export_slot, slots, bounds, len(window)):
        begin, end = bounds[row], bounds[row] + offset
        kept = max(0, KEPT - offset)  # rows of the window before that are still in it
        window[slot, :kept] = window[slots[row], KEPT - kept :]
        window[slot, kept:] = x[max(begin, end - KEPT) : end].to(window.dtype)
    return short_conv.meaning(x, weight, window, slots, cu)


@short_conv_export.fake
def _(x, weight, window, slots, cu, export_offset, export_slot) -> Tensor:
    return x.new_empty(x.shape)


@short_conv_export.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    cases = {(): (), (0,): (0,), (1,): (1,), (1, 1, 1): (1, 0, 1), (3, 0, 1, 70): (2, 0, 1, 64), (5,): (5,)}
    for args, offsets in zip(conv_samples(dtype, tuple(map(list, cases))), cases.values()):
        yield *args, *export_columns(offsets, args[3], len(args[2]))
