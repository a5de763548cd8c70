"""The short convolutions in Triton: a program takes some tokens of some channels, whatever rows they are of.

    token -> its row, by bisection of cu -> x[t - back], or the row's window where that lies before it
    then, when every output is there:  the windows, each moved to the end of its row (and to an export's slot)

All six ops are registered here; conv_verify_states_triton.py and conv_scan_triton.py have their own kernels.
T token rows, C channels, S slots, R requests, J recorded rows; ``cu`` [R+1] bounds the rows.
"""

from torch import Tensor

from .conv import short_conv, short_conv_verify
from .conv_export import short_conv_export
from .conv_rows_triton import apart, owner_of, rows_back, silu, window_at, with_row
from .conv_scan import conv_scan, conv_scan_export
from .conv_scan_triton import objection as scan_objection
from .conv_scan_triton import scan
from .conv_verify_states import short_conv_verify_states
from .conv_verify_states_triton import outputs_and_windows
from .jit_triton import blocks, first_objection, jit, launch, no_gpu, not_rows, tl, wrong_dtype

TOKENS, COLUMNS = 16, 128  # of a program
MOST_COLUMNS = 256  # of a program that moves windows


@jit
def conv_kernel(
    x, weight, window, slots, cu, y, rec,
    x_row, weight_row, window_slot, window_row, rec_slot, rec_row, T, C, R, J,
    RECORD: tl.constexpr, STEPS: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    col = tl.program_id(1) * BC + tl.arange(0, BC)
    row = owner_of(token, cu, R, STEPS)
    owned = (token < T) & (row < R)
    place = token - tl.load(cu + row, mask=owned, other=0)
    slot = tl.load(slots + row, mask=owned, other=0).to(tl.int64)
    live, wide = col < C, owned[:, None] & (col < C)[None, :]
    total = tl.zeros((BT, BC), tl.float32)
    for back in tl.static_range(4):
        new, old = rows_back(
            x, window, token, place, slot * window_slot, back, x_row, window_row, col, col, wide
        )
        total = with_row(total, new, old, weight, back, weight_row, col, live)
        if RECORD and back == 0:
            put = slot * rec_slot + place * rec_row
            fits = wide & (place < J)[:, None]
            tl.store(rec + put[:, None] + col[None, :], new.to(rec.dtype.element_ty), mask=fits)
    result = tl.where(owned[:, None], silu(total), 0.0)
    at = token.to(tl.int64)[:, None] * C + col[None, :]
    tl.store(y + at, result.to(y.dtype.element_ty), mask=(token < T)[:, None] & live[None, :])


@jit
def window_kernel(
    x, window, slots, cu, export_offset, export_slot,
    x_row, window_slot, window_row, C, S, N,
    EXPORT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    col = tl.program_id(1) * BC + tl.arange(0, BC)
    live = col < C
    begin, end = tl.load(cu + request), tl.load(cu + request + 1)
    slot, count = tl.load(slots + request).to(tl.int64), end - begin
    if EXPORT:
        listed = request < N
        offset = tl.load(export_offset + request, mask=listed, other=0)
        place = tl.load(export_slot + request, mask=listed, other=0).to(tl.int64)
        right = live & (offset > 0) & (offset <= count) & (place >= 0) & (place < S) & (place != slot)
        for j in tl.static_range(3):
            held = window_at(
                x, window, begin, offset, slot, j, x_row, window_slot, window_row, col, col, right
            )
            put = window + place * window_slot + j * window_row + col
            tl.store(put, held.to(window.dtype.element_ty), mask=right)
    moves = live & (count > 0)
    first = window_at(x, window, begin, count, slot, 0, x_row, window_slot, window_row, col, col, moves)
    second = window_at(x, window, begin, count, slot, 1, x_row, window_slot, window_row, col, col, moves)
    third = window_at(x, window, begin, count, slot, 2, x_row, window_slot, window_row, col, col, moves)
    put = window + slot * window_slot + col
    tl.store(put, first.to(window.dtype.element_ty), mask=moves)
    tl.store(put + window_row, second.to(window.dtype.element_ty), mask=moves)
    tl.store(put + 2 * window_row, third.to(window.dtype.element_ty), mask=moves)


def objection(
    x: Tensor, weight: Tensor, window: Tensor, slots: Tensor, cu: Tensor, *more: Tensor
) -> str | None:
    """Why these arguments are not for here, or None. more: the records, or the export columns."""
    names = ("rec_x",) if len(more) == 1 else ("export_offset", "export_slot")
    return no_gpu(x, weight, window, slots, cu, *more) or first_objection(
        wrong_dtype(x, weight, window),
        not_rows(x=x, window=window),
        apart(weight=weight, slots=slots, cu=cu, **dict(zip(names, more))),
    )


def states_objection(
    x: Tensor, weight: Tensor, window: Tensor, slots: Tensor, cu: Tensor, scratch: Tensor
) -> str | None:
    """The same; the columns of scratch may lie as they like."""
    return no_gpu(scratch) or objection(x, weight, window, slots, cu)


def outputs(
    x: Tensor, weight: Tensor, window: Tensor, slots: Tensor, cu: Tensor, rec: Tensor | None = None
) -> Tensor:
    """y [T, C]; the windows are only read, and the raw rows go to ``rec`` where there is one."""
    (tokens, channels), requests = x.shape, slots.shape[0]
    y = x.new_empty(x.shape)
    rec_steps = (0, 0) if rec is None else (rec.stride(0), rec.stride(1))
    launch(
        conv_kernel, (blocks(tokens, TOKENS), blocks(channels, COLUMNS)),
        x, weight, window, slots, cu, y, rec,
        x.stride(0), weight.stride(0), window.stride(0), window.stride(1), *rec_steps,
        tokens, channels, requests, 0 if rec is None else rec.shape[1],
        RECORD=rec is not None, STEPS=requests.bit_length(), BT=TOKENS, BC=COLUMNS,
    )  # fmt: skip
    return y


def move_windows(
    x: Tensor, window: Tensor, slots: Tensor, cu: Tensor, columns: tuple[Tensor, Tensor] | None
) -> None:
    """Each window to the end of its row; ``columns`` export_offset and export_slot, or None."""
    offset, place = columns or (None, None)
    grid = (slots.shape[0], blocks(x.shape[1], MOST_COLUMNS))
    steps = (x.stride(0), window.stride(0), window.stride(1), x.shape[1], window.shape[0])
    counted = 0 if offset is None else offset.shape[0]
    launch(
        window_kernel, grid, x, window, slots, cu, offset, place, *steps, counted,
        EXPORT=columns is not None, BC=MOST_COLUMNS, num_warps=2,
    )  # fmt: skip


@short_conv.impl("triton", objection=objection)
def short_conv_triton(x: Tensor, weight: Tensor, window: Tensor, slots: Tensor, cu: Tensor) -> Tensor:
    """As the meaning."""
    y = outputs(x, weight, window, slots, cu)
    move_windows(x, window, slots, cu, None)
    return y


@short_conv_export.impl("triton", objection=objection)
def short_conv_export_triton(
    x: Tensor,
    weight: Tensor,
    window: Tensor,
    slots: Tensor,
    cu: Tensor,
    export_offset: Tensor,
    export_slot: Tensor,
) -> Tensor:
    """As the meaning, except that a wrong offset or slot is not refused, for which it would have to wait for
    the device: such a row leaves no checkpoint, and nothing outside the pool is written.
    """
    y = outputs(x, weight, window, slots, cu)
    move_windows(x, window, slots, cu, (export_offset, export_slot))
    return y


@short_conv_verify.impl("triton", objection=objection)
def short_conv_verify_triton(
    x: Tensor, weight: Tensor, window: Tensor, slots: Tensor, cu: Tensor, rec_x: Tensor
) -> Tensor:
    """As the meaning; tokens of a row past the J that the records hold are computed and not recorded."""
    return outputs(x, weight, window, slots, cu, rec_x)


@short_conv_verify_states.impl("triton", objection=states_objection)
def short_conv_verify_states_triton(
    x: Tensor, weight: Tensor, window: Tensor, slots: Tensor, cu: Tensor, scratch: Tensor
) -> Tensor:
    """As the meaning, except that nothing is refused, for which it would have to wait for the device: tokens
    past the J that scratch has slots for are computed and leave no window, nor does one whose slot does not
    exist; where two rows write one slot either may be the last.
    """
    return outputs_and_windows(x, weight, window, slots, cu, scratch)


@conv_scan.impl("triton", objection=scan_objection)
def conv_scan_triton(x: Tensor, weight: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
    """As the meaning, in one launch; a window of another dtype than x's is not rounded to it on the way."""
    return scan(x, weight, initial, None)


@conv_scan_export.impl("triton", objection=scan_objection)
def conv_scan_export_triton(
    x: Tensor, weight: Tensor, initial: Tensor, export_offset: Tensor, pool: Tensor, site: int
) -> tuple[Tensor, Tensor]:
    """As the meaning, except that a wrong offset is not refused, for which it would have to wait for the
    device: such a sequence leaves no checkpoint.
    """
    return scan(x, weight, initial, (export_offset, pool[site]))
