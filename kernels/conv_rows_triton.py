"""What the short convolutions share in Triton: whose a token is, the rows before it, and windows.

    strip of a row     w w w x x x x x        w: of its window
    rows_back 2          '-'-'-'-'            for every token the row two before it, wherever that is
    window_at 4                '---'          after so many tokens

Rows of tokens are addressed by 64 bits: a long prompt of wide rows has more elements than 32 can count.
"""

from torch import Tensor

from .jit_triton import jit, tl


@jit
def owner_of(token, cu, R, STEPS: tl.constexpr):
    """The row r of each token with cu[r] <= token < cu[r + 1]; R past the last."""
    low, high = tl.zeros_like(token), tl.zeros_like(token) + R
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        open_ = low < high
        after = tl.load(cu + middle + 1, mask=open_, other=0) <= token
        low, high = tl.where(open_ & after, middle + 1, low), tl.where(open_ & (after == 0), middle, high)
    return low


@jit
def rows_back(x, window, token, place, base, back, x_row, window_row, over, under, wide):
    """The row so many before each token, from x and from the window that is ``base`` inside its pool; each is
    zero where the other has it. over, under: where the channels of a row of either are.
    """
    fresh = place >= back
    at = (token - back).to(tl.int64) * x_row
    new = tl.load(x + at[:, None] + over[None, :], mask=wide & fresh[:, None], other=0.0)
    kept = base + (3 + place - back) * window_row
    old = tl.load(window + kept[:, None] + under[None, :], mask=wide & (fresh == 0)[:, None], other=0.0)
    return new, old


@jit
def tap_of(weight, back, weight_row, col, live):
    """What the row so many before a token counts, channel by channel."""
    return tl.load(weight + col * weight_row + (3 - back), mask=live, other=0.0).to(tl.float32)


@jit
def with_row(total, new, old, weight, back, weight_row, col, live):
    """The sums of the tokens and such a row of each, rounded once: not left to a compiler's contractions."""
    tap = tap_of(weight, back, weight_row, col, live)
    return tl.fma(new.to(tl.float32) + old.to(tl.float32), tap[None, :], total)


@jit
def silu(total):
    return total / (1.0 + tl.exp(-total))


@jit
def window_at(x, window, begin, after, slot, j, x_row, window_slot, window_row, over, under, live):
    """Row j of the window after so many tokens of a row: a token, or what the window held."""
    place = after - 3 + j
    new = tl.load(x + (begin + place).to(tl.int64) * x_row + over, mask=live & (place >= 0), other=0.0)
    old = tl.load(
        window + slot * window_slot + (after + j) * window_row + under, mask=live & (place < 0), other=0.0
    )
    return tl.where(place >= 0, new.to(tl.float32), old.to(tl.float32))


def apart(**tensors: Tensor) -> str | None:
    """Why the named tensors are not read as they lie, or None: elements of their last dimension have gaps."""
    for name, t in tensors.items():
        if t.stride(-1) != 1:
            return f"{name} has elements {t.stride(-1)} apart along its last dimension, not side by side"
    return None
