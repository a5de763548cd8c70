"""The short convolution under speculation without records, in Triton: a window after every row of drafts.

    program (row of drafts, some channels)   w w w, read once -> y of a token, the window to the token's slot,
                                             on to the next

A program has its part of the window in registers before it writes any: a row may live in one of its targets.
T token rows, C channels, S slots, R requests, J columns of scratch; ``cu`` [R+1] bounds the rows.
"""

from torch import Tensor

from .conv_rows_triton import silu, tap_of
from .jit_triton import blocks, jit, launch, tl

COLUMNS = 256  # of a program


@jit
def windows_kernel(
    x, weight, window, slots, cu, scratch, y,
    x_row, weight_row, window_slot, window_row, scratch_row, scratch_col, T, C, R, S, J,
    BC: tl.constexpr,
):  # fmt: skip
    row, col = tl.program_id(0), tl.program_id(1) * BC + tl.arange(0, BC)
    live, begin = col < C, tl.load(cu + row).to(tl.int64)
    if row == R:  # token rows of nobody
        for token in range(begin, T):
            tl.store(y + token * C + col, tl.zeros((BC,), tl.float32).to(y.dtype.element_ty), mask=live)
    else:
        count, slot = (tl.load(cu + row + 1) - begin).to(tl.int32), tl.load(slots + row).to(tl.int64)
        own, some = window + slot * window_slot + col, live & (count > 0)
        third = tl.load(own, mask=some, other=0.0).to(tl.float32)
        second = tl.load(own + window_row, mask=some, other=0.0).to(tl.float32)
        first = tl.load(own + 2 * window_row, mask=some, other=0.0).to(tl.float32)  # the last before the row
        of_now, of_first = tap_of(weight, 0, weight_row, col, live), tap_of(weight, 1, weight_row, col, live)
        of_second, of_third = (
            tap_of(weight, 2, weight_row, col, live),
            tap_of(weight, 3, weight_row, col, live),
        )
        for i in range(count):
            token = begin + i
            now = tl.load(x + token * x_row + col, mask=live, other=0.0).to(tl.float32)
            total = tl.fma(second, of_second, tl.fma(first, of_first, now * of_now))
            total = tl.fma(third, of_third, total)
            tl.store(y + token * C + col, silu(total).to(y.dtype.element_ty), mask=live)
            place = tl.load(scratch + row * scratch_row + i * scratch_col, mask=i < J, other=-1).to(tl.int64)
            put, kept = window + place * window_slot + col, live & (place >= 0) & (place < S)
            third, second, first = second, first, now
            tl.store(put, third.to(window.dtype.element_ty), mask=kept)
            tl.store(put + window_row, second.to(window.dtype.element_ty), mask=kept)
            tl.store(put + 2 * window_row, first.to(window.dtype.element_ty), mask=kept)


def outputs_and_windows(
    x: Tensor, weight: Tensor, window: Tensor, slots: Tensor, cu: Tensor, scratch: Tensor
) -> Tensor:
    """y [T, C]; the window after row i of request r goes to window [scratch[r, i]]."""
    (tokens, channels), requests = x.shape, slots.shape[0]
    y = x.new_empty(x.shape)
    launch(
        windows_kernel, (requests + 1, blocks(channels, COLUMNS)),
        x, weight, window, slots, cu, scratch, y,
        x.stride(0), weight.stride(0), window.stride(0), window.stride(1), *scratch.stride(),
        tokens, channels, requests, window.shape[0], scratch.shape[1],
        BC=COLUMNS, num_warps=2,
    )  # fmt: skip
    return y
