"""The end of a latent mixture of experts, as one op: weigh and sum, reduce, norm, project up, add the shared.

    rows, w, idx --sum over k--> y --sum over ranks--> RMS norm --up_w--.
    shared_partial -----------------sum over ranks----------------------+--> out

T token rows, k experts a token, N rows of experts, L latent, D width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from .groups import ranks_of
from .op import acc_of, op
from .samples import Draw


@op()
def latent_tail(
    rows: Tensor,
    w: Tensor,
    idx: Tensor,
    norm_w: Tensor,
    up_w: Tensor,
    shared_partial: Tensor,
    eps: float,
    group: str,
) -> Tensor:
    """out = up_w norm(y) + shared, y[t] = sum_j w[t, j] rows[idx[t, j]], both summed over ``group`` before.

    rows [N, L], w [T, k] acc, idx [T, k] int32 or int64, norm_w [L], up_w [D, L], shared_partial [T, D]
    -> [T, D] of shared_partial's dtype. A negative idx is a hole: it contributes nothing, whatever the rows
    and its weight are. group: the name of a process group, or "" for no sum over ranks. Sums in acc with one
    rounding at the end; over ranks travels what is rounded to rows' dtype, as many bytes as without the op.
    Over several ranks latent_tail_tiers.py computes it; shared_partial is this rank's part of a sum, so what
    every rank has whole would count once a rank.
    """
    y, shared = reduced(finalized(readable(rows), w, idx), rows.dtype, shared_partial, group)
    up = F.linear(normed(y, norm_w, eps), up_w.to(y.dtype))
    return (up + acc_of(shared)).to(shared_partial.dtype)


def left_to_tiers(group: str) -> str | None:
    """Why what computes on one rank is not for ``group``, or None."""
    return "summed over ranks, by tiers" if group and ranks_of(group) != 1 else None


def readable(rows: Tensor) -> Tensor:
    """Rows of which there is one to read in place of a hole's; all are holes where there was none."""
    return rows if rows.shape[0] else rows.new_zeros(1, rows.shape[1])


def finalized(rows: Tensor, w: Tensor, idx: Tensor) -> Tensor:
    """y [T, L] in acc. Row 0 is read in place of a hole's and dropped before the sum."""
    chosen = rows.index_select(0, idx.clamp(min=0).flatten()).unflatten(0, idx.shape)
    weighted = acc_of(chosen) * w.unsqueeze(-1)
    return torch.where((idx >= 0).unsqueeze(-1), weighted, 0.0).sum(1)


def reduced(y: Tensor, dtype: torch.dtype, shared: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """Both summed over ``group``; both are on their way before either is waited for."""
    if not group:
        return y, shared
    ops = torch.ops._c10d_functional
    sums = [ops.all_reduce(part.contiguous(), "sum", group) for part in (y.to(dtype), shared)]
    y, shared = (ops.wait_tensor(part) for part in sums)
    return acc_of(y), shared


def normed(y: Tensor, norm_w: Tensor, eps: float) -> Tensor:
    """y / rms(y) * norm_w over the last dimension, without a rounding.  y [T, L] acc."""
    return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * norm_w.to(y.dtype)


@latent_tail.fake
def _(rows, w, idx, norm_w, up_w, shared_partial, eps, group):
    return shared_partial.new_empty(idx.shape[0], up_w.shape[0])


@latent_tail.opened
def _(rows, w, idx, norm_w, up_w, shared_partial, eps, group):
    """The same for a compiler, which multiplies in the model's dtype and fuses the rest."""
    dtype = shared_partial.dtype
    y, shared = reduced(finalized(rows, w, idx), rows.dtype, shared_partial, group)
    up = F.linear(normed(y, norm_w, eps).to(dtype), up_w.to(dtype))
    return (acc_of(up) + acc_of(shared)).to(dtype)


@latent_tail.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    draw = Draw(dtype)
    for tokens, top_k, count in ((0, 2, 1), (1, 1, 2), (7, 4, 28), (5, 8, 40)):
        idx = draw.below(count + 1, tokens, top_k, dtype=torch.int32) - 1
        weights = draw.normal(24), draw.normal(32, 24) * 24**-0.5
        yield draw.normal(count, 24), draw.fraction(tokens, top_k), idx, *weights, *rest(draw, tokens, 32)
    wide = draw.normal(9, 48)[:, 8:32]  # rows between which lies something else, and 64-bit indices
    weights = draw.normal(24), draw.normal(24, 16).t() * 24**-0.5
    yield wide, draw.fraction(3, 3), draw.below(9, 3, 3), *weights, *rest(draw, 3, 16)


def rest(draw: Draw, tokens: int, width: int) -> tuple:
    """shared_partial, eps, group."""
    return draw.normal(tokens, width), 1e-5, ""
