"""The short causal convolution before KDA: four taps a channel, then SiLU, over ragged rows.

    row r of the packed input     w w w x x x x x x        w: the window, its last three raw rows
                                  '-'-'-' -> y0
                                    '-'-'-' -> y1 ...
    window afterwards                         x x x        the last three of the same strip

T token rows, C channels, S slots, R requests, J recorded rows; ``cu`` [R+1] bounds the rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .op import acc_of, op

TAPS = 4


@op(writes=("window",), opaque=True)
def short_conv(x: Tensor, weight: Tensor, window: Tensor, slots: Tensor, cu: Tensor) -> Tensor:
    """y[t] = silu(sum_j weight[:, j] x[t-3+j]), and the window moved to each row's last three raw rows.

    x [T, C], weight [C, 4] acc, window(a!) [S, 3, C], slots [R], cu [R+1] -> y [T, C]. A row of length 0
    leaves its window as it was.
    """
    bounds = cu.tolist()
    y, strip = convolve(x, weight, window, slots, bounds)
    ends = torch.tensor([bounds[r + 1] + 3 * r for r in range(len(bounds) - 1)], dtype=torch.int64)
    last = ends.unsqueeze(1) + torch.arange(3)
    window[slots] = strip[last].to(window.dtype)
    return y


def convolve(x: Tensor, weight: Tensor, window: Tensor, slots: Tensor, bounds: list[int]) -> tuple:
    """The outputs, and the strip [T + 3R, C] in which every row follows its window."""
    rows = len(bounds) - 1
    lengths = torch.tensor([bounds[r + 1] - bounds[r] for r in range(rows)], dtype=torch.int64)
    shift = torch.repeat_interleave(torch.arange(rows) * 3, lengths)
    place = torch.arange(bounds[-1]) + shift  # the oldest tap of each token
    strip = x.new_empty(bounds[-1] + 3 * rows, x.shape[1])
    strip[place + 3] = x[: bounds[-1]]
    heads = torch.tensor(bounds[:-1], dtype=torch.int64) + torch.arange(rows) * 3
    strip[heads.unsqueeze(1) + torch.arange(3)] = window[slots].to(x.dtype)
    wide = acc_of(strip)
    total = sum(wide[place + j] * weight[:, j] for j in range(TAPS))
    y = x.new_zeros(x.shape)
    y[: bounds[-1]] = torch.nn.functional.silu(total).to(x.dtype)
    return y, strip


@short_conv.fake
def _(x: Tensor, weight: Tensor, window: Tensor, slots: Tensor, cu: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@op(writes=("rec_x",), opaque=True)
def short_conv_verify(
    x: Tensor, weight: Tensor, window: Tensor, slots: Tensor, cu: Tensor, rec_x: Tensor
) -> Tensor:
    """The same outputs, but the window is only read: the raw rows go to rec_x(a!) [S, J, C] instead.

    Raises ValueError when a row is longer than J.
    """
    bounds = cu.tolist()
    y, _ = convolve(x, weight, window, slots, bounds)
    row, at = positions(bounds)
    rec_x[slots[row], at] = x[: bounds[-1]].to(rec_x.dtype)
    return y


def positions(bounds: list[int]) -> tuple[Tensor, Tensor]:
    """For each token row: the request it belongs to and its place in it."""
    begin = torch.tensor(bounds, dtype=torch.int64)
    row = torch.repeat_interleave(torch.arange(len(bounds) - 1), begin.diff())
    return row, torch.arange(bounds[-1]) - begin[row]


@short_conv_verify.fake
def _(x: Tensor, weight: Tensor, window: Tensor, slots: Tensor, cu: Tensor, rec_x: Tensor) -> Tensor:
    return x.new_empty(x.shape)
