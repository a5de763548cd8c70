"""The short causal convolution before KDA: four taps a channel, then SiLU, over ragged rows.

    a row with its window     w w w x x x x x        w: the last three raw rows of the steps before
                              '-'-'-' -> y0
                                '-'-'-' -> y1 ...
    the window afterwards               x x x        the last three of the same strip

All rows are convolved as if they were one; then the first three tokens of each are redone from its window.
T token rows, C channels, S slots, R requests, J recorded rows; ``cu`` [R+1] bounds the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from .op import acc, acc_of, op
from .samples import Draw, gapped, row_bounds

TAPS = 4
KEPT = TAPS - 1  # raw rows a window holds
BLOCK = 64  # token rows that stay in cache over the passes of a convolution


@op(writes=("window",), opaque=True)
def short_conv(x: Tensor, weight: Tensor, window: Tensor, slots: Tensor, cu: Tensor) -> Tensor:
    """y[t] = silu(sum_j weight[:, j] x[t-3+j]), and the window moved to each row's last three raw rows.

    x [T, C], weight [C, 4] acc, window(a!) [S, 3, C], slots [R], cu [R+1] -> y [T, C]. A row of length 0
    leaves its window as it was. Token rows past cu[-1] are not read and come back zero.
    """
    bounds, before = cu.tolist(), window.index_select(0, slots)
    y = convolve(x, weight, before, bounds)
    if bounds[-1] == 0:
        return y
    for slot, old, (begin, end) in zip(slots.tolist(), before, pairwise(bounds)):
        new = window[slot]
        if end - begin >= KEPT:
            new.copy_(x[end - KEPT : end])
        elif end > begin:
            new[: begin - end].copy_(old[end - begin :])
            new[begin - end :].copy_(x[begin:end])
    return y


def convolve(x: Tensor, weight: Tensor, before: Tensor, bounds: list[int]) -> Tensor:
    """The outputs, given the windows [R, 3, C] of the rows."""
    total, wide = bounds[-1], acc(x.dtype)
    taps = weight.t().to(wide).contiguous()  # [4, C]
    if total == len(before) == x.shape[0] and all(b - a == 1 for a, b in pairwise(bounds)):
        mixed = (before.to(wide) * taps[:KEPT]).sum(1).addcmul_(x.to(wide), taps[KEPT])
        return F.silu(mixed, inplace=True).to(x.dtype)
    if total == 0:
        return x.new_zeros(x.shape)
    raw, out = x[:total].to(wide), torch.empty(x.shape, dtype=wide, device=x.device)
    out[total:] = 0.0
    for first in range(0, total, BLOCK):
        last = min(first + BLOCK, total)
        mixed = torch.mul(raw[first:last], taps[KEPT], out=out[first:last])
        for back in range(1, TAPS):
            begin = max(first, back)
            out[begin:last].addcmul_(raw[begin - back : last - back], taps[KEPT - back])
        F.silu(mixed, inplace=True)
    heads(out, raw, taps, before.to(wide), bounds)
    return out.to(x.dtype)


def heads(out: Tensor, raw: Tensor, taps: Tensor, before: Tensor, bounds: list[int]) -> None:
    """Overwrite the first three outputs of every row of out [T, C], which saw the row before."""
    begin = torch.tensor(bounds, device=raw.device)
    place = torch.arange(KEPT, device=raw.device)
    tokens = begin[:-1, None] + place  # [R, 3]
    inside = place < begin.diff().unsqueeze(1)
    first = raw.index_select(0, tokens.clamp(max=len(raw) - 1).view(-1)).view(*tokens.shape, -1)
    strip = torch.cat([before, first], 1)  # [R, 6, C]
    sums = strip[:, :KEPT] * taps[0]
    for j in range(1, TAPS):
        sums.addcmul_(strip[:, j : j + KEPT], taps[j])
    out.index_copy_(0, tokens[inside], F.silu(sums[inside]))


def owners(cu: Tensor, tokens: int, requests: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of every token row: its request, its place there, and whether it has one; no shape depends on data.

    A token row past cu[-1] is said to be the first one of request 0, which may not exist either.
    """
    token = torch.arange(tokens, device=cu.device)
    row = torch.searchsorted(cu, token, right=True) - 1
    owned = row < requests
    row = torch.where(owned, row, 0)
    return row, torch.where(owned, token - cu.index_select(0, row), 0), owned


def of_owner(values: Tensor, row: Tensor) -> Tensor:
    """values [R] of each token row's request, for an R that may be 0."""
    return torch.cat([values, values.new_zeros(1)]).index_select(0, row)


def extents(cu: Tensor, requests: int) -> tuple[Tensor, Tensor]:
    """First token row and number of token rows of each request."""
    request = torch.arange(requests, device=cu.device)
    begin = cu.index_select(0, request)
    return begin, cu.index_select(0, request + 1) - begin


@short_conv.opened
def _(x: Tensor, weight: Tensor, window: Tensor, slots: Tensor, cu: Tensor) -> Tensor:
    y, before = convolve_traceable(x, weight, window, slots, cu)
    begin, count = extents(cu, slots.shape[0])
    padded = torch.cat([x, x.new_zeros(1, x.shape[1])])
    kept = []
    for j in range(KEPT):
        place = count - KEPT + j
        held = before.gather(1, (place + KEPT).clamp(max=KEPT - 1)[:, None, None].expand(-1, 1, x.shape[1]))
        fresh = padded.index_select(0, torch.where(place >= 0, begin + place, 0))
        kept.append(torch.where((place >= 0).unsqueeze(1), fresh, held.squeeze(1)))
    window.index_put_((slots,), torch.stack(kept, 1).to(window.dtype))
    return y


def convolve_traceable(x: Tensor, weight: Tensor, window: Tensor, slots: Tensor, cu: Tensor) -> tuple:
    """The outputs by gathers alone, and the windows [R, 3, C] that they started from."""
    before = window.index_select(0, slots)
    row, place, owned = owners(cu, x.shape[0], slots.shape[0])
    token, total = torch.arange(x.shape[0], device=x.device), torch.zeros_like(acc_of(x))
    flat = torch.cat([before.flatten(0, 1), before.new_zeros(KEPT, x.shape[1])])  # a window more: R may be 0
    for back in range(TAPS):
        inside = (place >= back).unsqueeze(1)
        fresh = x.index_select(0, (token - back).clamp(min=0))
        held = flat.index_select(0, row * KEPT + (KEPT + place - back).clamp(max=KEPT - 1))
        total = total + acc_of(torch.where(inside, fresh, held.to(x.dtype))) * weight[:, KEPT - back]
    return torch.where(owned.unsqueeze(1), F.silu(total), 0.0).to(x.dtype), before


@short_conv.fake
def _(x: Tensor, weight: Tensor, window: Tensor, slots: Tensor, cu: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@short_conv.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    yield from conv_samples(dtype, ([], [0], [1], [1, 1, 1], [3, 0, 1, 70, 2], [5]))


def conv_samples(dtype: torch.dtype, lengths: tuple[list[int], ...]) -> Iterator[tuple]:
    """Arguments of short_conv; every second one is a strided slice with gaps between the windows."""
    draw, slots, channels = Draw(dtype), 8, 12
    for i, rows in enumerate(lengths):
        x, window = draw.normal(sum(rows), 2 * channels), draw.normal(slots, KEPT, channels)
        if i % 2:
            x, window = x[:, 3 : 3 + channels], gapped(window)
        else:
            x = x[:, :channels].contiguous()
        yield x, draw.normal_acc(channels, TAPS), window, draw.choice(len(rows), slots), row_bounds(rows)


@op(writes=("rec_x",), opaque=True)
def short_conv_verify(
    x: Tensor, weight: Tensor, window: Tensor, slots: Tensor, cu: Tensor, rec_x: Tensor
) -> Tensor:
    """The same outputs, but the window is only read: the raw rows go to rec_x(a!) [S, J, C] instead.

    Raises ValueError when a row is longer than J.
    """
    bounds = cu.tolist()
    longest = max((end - begin for begin, end in pairwise(bounds)), default=0)
    if longest > rec_x.shape[1]:
        raise ValueError(f"a verify row has {longest} tokens, the records hold {rec_x.shape[1]}")
    for slot, (begin, end) in zip(slots.tolist(), pairwise(bounds)):
        rec_x[slot, : end - begin].copy_(x[begin:end])
    return convolve(x, weight, window.index_select(0, slots), bounds)


@short_conv_verify.fake
def _(x: Tensor, weight: Tensor, window: Tensor, slots: Tensor, cu: Tensor, rec_x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@short_conv_verify.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    for args in conv_samples(dtype, ([], [1], [4, 1, 0, 9], [2, 2])):
        x, window = args[0], args[2]
        yield *args, x.new_full((len(window), 9, x.shape[1]), 7.0)


@short_conv_verify.opened
def _(x: Tensor, weight: Tensor, window: Tensor, slots: Tensor, cu: Tensor, rec_x: Tensor) -> Tensor:
    row, place, owned = owners(cu, x.shape[0], slots.shape[0])
    slot = torch.where(owned, of_owner(slots, row), 0)  # the null slot takes what belongs to nobody
    rec_x.index_put_((slot, place), x.to(rec_x.dtype))
    return convolve_traceable(x, weight, window, slots, cu)[0]
