"""Attention to parts of a context, merged: what each part gave, weighted by how much of the whole it is.

    lse = log sum_n exp(lse_n)          o = sum_n exp(lse_n - lse) o_n

The logarithms are natural. A part without tokens has lse = -inf and o = 0 and weighs nothing; where every
part is so, the result is 0. A NaN is passed on, whatever it came from.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .op import acc_of, op
from .samples import Draw


@op()
def lse_merge(o: Tensor, lse: Tensor) -> Tensor:
    """o [N, a, b, L], each the softmax-weighted mean over one of N parts, lse [N, a, b] the logarithm of its
    sum of exponentials -> [a, b, L] in o's acc: the mean over all parts.
    """
    wide, sums = acc_of(o), acc_of(lse)
    top = sums.amax(0)
    top = torch.where(top == -torch.inf, 0.0, top)  # nothing anywhere: -inf - -inf would be NaN
    weights = (sums - top).exp()
    total = weights.sum(0)
    share = weights / torch.where(total == 0.0, 1.0, total)
    return (wide * share.unsqueeze(-1)).sum(0)


@lse_merge.fake
def _(o: Tensor, lse: Tensor) -> Tensor:
    return acc_of(o.new_empty(o.shape[1:]))


@lse_merge.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    draw = Draw(dtype)
    for parts, rows, heads in ((2, 0, 3), (1, 1, 1), (4, 5, 2), (3, 2, 7)):
        o, lse = draw.normal_acc(parts, rows, heads, 6), draw.normal_acc(parts, rows, heads) * 4
        if parts > 1:
            o[0, ::2], lse[0, ::2] = 0.0, -torch.inf
        yield o, lse
    packed = draw.normal_acc(4, 3, 5, 9)  # as it arrives from other ranks
    yield packed[..., :8], packed[..., 8]
