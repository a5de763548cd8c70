"""The short convolution in C++ on a CPU, beside its four ops; cpu/conv.cpp has the picture.

short_conv, _export      windows move, checkpoints are left on the way
short_conv_verify        windows are read, raw rows are recorded
.._verify_states         windows are read; those after each row are copied as in the meaning
"""

from __future__ import annotations

import torch
from torch import Tensor

from .conv import short_conv, short_conv_verify
from .conv_export import short_conv_export
from .conv_verify_states import leave_windows, short_conv_verify_states
from .exports import exports_of
from .kda_verify import rows_that_fit
from .native import address, best_isa, entry, left_to_meaning, longs, numbers, threads, unavailable

NOTE = "C++ that was compiled here"


def objection(x, weight, window, *more) -> str | None:
    """Why these arguments are not for here, or None; the first answer compiles the kernel."""
    if x.device.type != "cpu":
        return f"{x.device.type} tensors"
    given = [x, weight, window, *(m for m in more if isinstance(m, Tensor) and m.is_floating_point())]
    if wrong := sorted({str(t.dtype) for t in given} - {"torch.float32"}):
        return f"some arguments are {', '.join(wrong)}, not float32"
    if any(t.stride(-1) != 1 for t in given):
        return "channels, or taps, are not side by side"
    return "vectors of four lanes gain nothing" if best_isa() == "portable" else unavailable("conv")


def convolve(
    x: Tensor,
    weight: Tensor,
    window: Tensor,
    slots: Tensor,
    cu: Tensor,
    *,
    moves: bool,
    exports: dict[int, tuple[int, int]] | None = None,
    records: Tensor | None = None,
    isa: str | None = None,
) -> Tensor:
    """The outputs [T, C]. moves: windows move on. exports: row -> (offset, slot). isa: default the best."""
    (tokens, channels), rows = x.shape, slots.shape[0]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if rows == 0:
        return y.zero_() if tokens else y
    slots, cu = longs(slots), longs(cu)
    leaves = [n for r in range(rows) for n in exports.get(r, (0, 0))] if exports else []
    left = numbers(leaves)
    kept = (0, 0) if records is None else records.stride()[:2]
    entry("conv", "k3_conv", "20q", isa)(
        x.data_ptr(),
        weight.data_ptr(),
        y.data_ptr(),
        window.data_ptr(),
        address(records),
        slots.data_ptr(),
        cu.data_ptr(),
        left.buffer_info()[0] if exports else 0,
        rows,
        channels,
        tokens,
        moves,
        x.stride(0),
        weight.stride(0),
        y.stride(0),
        *window.stride()[:2],
        *kept,
        threads(),
    )
    return y


@short_conv.impl("native", objection=objection, note=NOTE, by_address=True)
def conv_native(x: Tensor, weight: Tensor, window: Tensor, slots: Tensor, cu: Tensor) -> Tensor:
    """As the meaning."""
    if left_to_meaning("conv"):
        return short_conv.meaning(x, weight, window, slots, cu)
    return convolve(x, weight, window, slots, cu, moves=True)


@short_conv_export.impl("native", objection=objection, note=NOTE, by_address=True)
def export_native(
    x: Tensor,
    weight: Tensor,
    window: Tensor,
    slots: Tensor,
    cu: Tensor,
    export_offset: Tensor,
    export_slot: Tensor,
) -> Tensor:
    """As the meaning; its bits are those of conv_native."""
    if left_to_meaning("conv"):
        return short_conv_export.meaning(x, weight, window, slots, cu, export_offset, export_slot)
    bounds = cu.tolist()
    found = exports_of(export_offset, export_slot, slots, bounds, len(window))
    exports = {e.row: (e.offset, e.slot) for e in found}
    return convolve(x, weight, window, slots, cu, moves=True, exports=exports)


@short_conv_verify.impl("native", objection=objection, note=NOTE, by_address=True)
def verify_native(
    x: Tensor, weight: Tensor, window: Tensor, slots: Tensor, cu: Tensor, rec_x: Tensor
) -> Tensor:
    """As the meaning."""
    if left_to_meaning("conv"):
        return short_conv_verify.meaning(x, weight, window, slots, cu, rec_x)
    if slots.shape[0]:
        rows_that_fit(cu.tolist(), rec_x.shape[1], "the records hold")
    return convolve(x, weight, window, slots, cu, moves=False, records=rec_x)


@short_conv_verify_states.impl("native", objection=objection, note=NOTE, by_address=True)
def verify_states_native(
    x: Tensor, weight: Tensor, window: Tensor, slots: Tensor, cu: Tensor, scratch: Tensor
) -> Tensor:
    """As the meaning; the outputs have the bits of verify_native."""
    if left_to_meaning("conv"):
        return short_conv_verify_states.meaning(x, weight, window, slots, cu, scratch)
    bounds, before = cu.tolist(), window.index_select(0, slots)
    y = convolve(x, weight, window, slots, cu, moves=False)
    leave_windows(x, window, before, slots, bounds, scratch)
    return y
