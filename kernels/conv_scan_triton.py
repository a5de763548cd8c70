"""The short convolution of equally long sequences in Triton: where a token is needs no search.

    program (some tokens, some channels, a sequence)    x[t - back], or the window where that lies before it
    the program behind the last tokens                  the window afterwards, and that of a checkpoint

Channels may lie apart, as in a model that keeps tokens side by side: [B, C, T] seen as [B, T, C].
B sequences, T tokens of each, C channels, N export entries.
"""

from torch import Tensor

from .conv_rows_triton import apart, rows_back, silu, window_at, with_row
from .jit_triton import blocks, first_objection, jit, launch, no_gpu, not_rows, power_of_two, tl, wrong_dtype

TOKENS, COLUMNS = 16, 128  # of a program
APART = 32  # channels of one where they lie apart: each is addressed by itself, which takes registers


@jit
def scan_kernel(
    x, weight, initial, y, window, export_offset, pool,
    x_seq, x_row, x_col, weight_row, initial_seq, initial_row, initial_col, pool_seq, pool_row, T, C, N,
    EXPORT: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    first, sequence = tl.program_id(0) * BT, tl.program_id(2).to(tl.int64)
    left, lane = tl.program_id(1).to(tl.int64) * BC, tl.arange(0, BC)
    col = tl.program_id(1) * BC + lane
    live, over, under = col < C, lane * x_col, lane * initial_col
    x, initial = x + sequence * x_seq + left * x_col, initial + sequence * initial_seq + left * initial_col
    if first < T:
        place = first + tl.arange(0, BT)
        wide = (place < T)[:, None] & live[None, :]
        total = tl.zeros((BT, BC), tl.float32)
        for back in tl.static_range(4):
            new, old = rows_back(x, initial, place, place, 0, back, x_row, initial_row, over, under, wide)
            total = with_row(total, new, old, weight, back, weight_row, col, live)
        at = (sequence * T + place)[:, None] * C + col[None, :]
        tl.store(y + at, silu(total).to(y.dtype.element_ty), mask=wide)
    else:
        if EXPORT:
            offset = tl.load(export_offset + sequence, mask=sequence < N, other=0)
            right = live & (offset > 0) & (offset <= T)
            for j in tl.static_range(3):
                held = window_at(x, initial, 0, offset, 0, j, x_row, 0, initial_row, over, under, right)
                put = pool + sequence * pool_seq + j * pool_row + col
                tl.store(put, held.to(pool.dtype.element_ty), mask=right)
        end = tl.cast(T, tl.int64)  # a T of 1 is compiled in, and would be no tensor
        for j in tl.static_range(3):
            held = window_at(x, initial, 0, end, 0, j, x_row, 0, initial_row, over, under, live)
            put = window + (sequence * 3 + j) * C + col
            tl.store(put, held.to(window.dtype.element_ty), mask=live)


def objection(x: Tensor, weight: Tensor, initial: Tensor, *more: Tensor | int) -> str | None:
    """Why these arguments are not for here, or None. more: export offsets, the pool and its site."""
    columns = dict(zip(("export_offset", "pool"), more))
    return no_gpu(x, weight, initial, *columns.values()) or first_objection(
        wrong_dtype(x, weight, initial, *more[1:2]),
        *(not_rows(**{name: t}) for name, t in (("x", x), ("initial", initial)) if t.stride(-1) == 1),
        not_rows(pool=columns["pool"]) if more else None,
        apart(weight=weight, **columns),
    )


def scan(
    x: Tensor, weight: Tensor, initial: Tensor, columns: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """y and the last windows; ``columns`` export_offset [N] and its part of a pool [N, 3, C], or None."""
    count, tokens, channels = x.shape
    y, window = x.new_empty(x.shape), initial.new_empty(initial.shape)
    offset, pool = columns or (None, None)
    entries, steps = (0, (0, 0)) if pool is None else (min(len(offset), len(pool)), pool.stride()[:2])
    tall, wide = min(TOKENS, power_of_two(tokens)), COLUMNS if x.stride(2) == 1 else APART
    launch(
        scan_kernel, (blocks(tokens, tall) + 1, blocks(channels, wide), count),
        x, weight, initial, y, window, offset, pool,
        *x.stride(), weight.stride(0), *initial.stride(), *steps, tokens, channels, entries,
        EXPORT=pool is not None, BT=tall, BC=wide,
    )  # fmt: skip
    return y, window
