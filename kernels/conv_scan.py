"""The short convolution for models without slot pools: a batch of equally long sequences.

    initial[b]  w w w | x x x x x  sequence b          w: the last three raw tokens of the steps before
                '-----'-> y0
                  '-----'-> y1 ...
    window[b]               x x x                      pool[site, b]: the three before token m

B sequences, T tokens of each, C channels. What a token becomes is told in conv.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from .conv import KEPT, TAPS, convolve
from .exports import offsets_of
from .kda_scan import bounds_of
from .op import acc_of, op
from .samples import Draw, gapped


@op(opaque=True)
def conv_scan(x: Tensor, weight: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
    """y[b, t] = silu(sum_j weight[:, j] x[b, t-3+j]), and the last three raw tokens of each sequence.

    x [B, T, C], weight [C, 4] acc, initial [B, 3, C] -> y [B, T, C] in x's dtype, window [B, 3, C] in
    initial's. A sequence of fewer than three tokens keeps some of its window.
    """
    y = convolve(x.flatten(0, 1), weight, initial.to(x.dtype), bounds_of(x))
    return y.view(x.shape), window_after(x, initial, x.shape[1])


def window_after(x: Tensor, initial: Tensor, tokens: int) -> Tensor:
    """The last three raw tokens [B, 3, C] after so many of x [B, T, C]; never a view of either."""
    if tokens >= KEPT:
        return x[:, tokens - KEPT : tokens].to(
            initial.dtype, copy=True, memory_format=torch.contiguous_format
        )
    return torch.cat([initial[:, tokens:], x[:, :tokens].to(initial.dtype)], 1)


@conv_scan.opened
def _(x: Tensor, weight: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
    strip, tokens = torch.cat([initial.to(x.dtype), x], 1), x.shape[1]  # [B, 3 + T, C]
    token, total = torch.arange(tokens, device=x.device), torch.zeros_like(acc_of(x))
    for j in range(TAPS):
        total = total + acc_of(strip.index_select(1, token + j)) * weight[:, j]
    last = torch.arange(KEPT, device=x.device) + tokens
    return F.silu(total).to(x.dtype), torch.cat([initial, x.to(initial.dtype)], 1).index_select(1, last)


@conv_scan.fake
def _(x: Tensor, weight: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), initial.new_empty(initial.shape)


@conv_scan.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    draw, channels = Draw(dtype), 12
    for i, (count, tokens) in enumerate(((0, 4), (2, 0), (1, 1), (3, 1), (2, 2), (3, 5), (2, 70))):
        x, initial = draw.normal(count, tokens, 2 * channels), draw.normal(count, KEPT, channels)
        if i % 2:
            x, initial = x[..., 3 : 3 + channels], gapped(initial)
        else:
            x = x[..., :channels].mT.contiguous().mT
        yield x, draw.normal_acc(channels, TAPS), initial


@op(writes=("pool",), opaque=True)
def conv_scan_export(
    x: Tensor, weight: Tensor, initial: Tensor, export_offset: Tensor, pool: Tensor, site: int
) -> tuple[Tensor, Tensor]:
    """conv_scan, and pool[site, b] gets the window as it is after export_offset[b] tokens.

    export_offset [N] int32, entry b for sequence b, 0 for none; pool(a!) [sites, N, 3, C].
    Raises ValueError, before anything is written, for an offset that is negative or past the T tokens.
    """
    for b, m in enumerate(offsets_of(export_offset, bounds_of(x))):
        if m:
            pool[site, b].copy_(window_after(x[b : b + 1], initial[b : b + 1], m)[0])
    return conv_scan.meaning(x, weight, initial)


@conv_scan_export.fake
def _(x, weight, initial, export_offset, pool, site) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), initial.new_empty(initial.shape)


@conv_scan_export.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    for i, args in enumerate(conv_scan.each_sample(dtype)):
        x, _, initial = args
        offsets = [(3 * b + 1) % (x.shape[1] + 1) for b in range(x.shape[0])] + [0]
        pool = initial.new_full((3, len(offsets), *initial.shape[1:]), 7.0)
        yield *args, torch.tensor(offsets, dtype=torch.int32), pool, i % 3
