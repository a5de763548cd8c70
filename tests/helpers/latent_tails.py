"""Latent tails as people write them, piece by piece: ways to finalize, to norm, to project, and to add."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from k3compile.kernels import acc
from torch import Tensor
from torch.nn import functional as F

EPS = 1e-5


class Args(NamedTuple):
    """Arguments of a tail."""

    rows: Tensor
    w: Tensor
    idx: Tensor
    norm_w: Tensor
    up_w: Tensor
    shared: Tensor


def make_args(
    dtype=torch.float32, tokens=5, top_k=2, latent=24, width=16, *, holes=False, poison=False, seed=0
) -> Args:
    """Random arguments; holes: every third choice is elsewhere; poison: rows that nobody reads hold NaN."""
    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made, dtype=torch.float64)

    count = tokens * top_k + 3
    idx = torch.randperm(count, generator=made)[: tokens * top_k].view(tokens, top_k).to(torch.int32)
    w = torch.sigmoid(normal(tokens, top_k)).to(acc(dtype))
    rows = normal(count, latent)
    if holes:
        idx.view(-1)[::3] = -1
    if poison:
        unread = torch.ones(count, dtype=torch.bool)
        unread[idx[idx >= 0].long()] = False
        rows[unread] = torch.nan
    weights = 1 + 0.1 * normal(latent), normal(width, latent) * latent**-0.5
    return Args(rows.to(dtype), w, idx, *(t.to(dtype) for t in (*weights, normal(tokens, width))))


def float64(args: Args) -> Args:
    return Args(*(t.double() if t.is_floating_point() else t for t in args))


def select(rows, w, idx):
    chosen = rows.index_select(0, idx.view(-1)).view(*idx.shape, rows.shape[1])
    return (chosen * w[..., None]).sum(1).to(rows.dtype)


def fancy(rows, w, idx):
    return (w.unsqueeze(-1) * rows[idx].to(w.dtype)).sum(dim=1).to(rows.dtype)


def fancy_flat(rows, w, idx):
    chosen = rows[idx.flatten()] * w.reshape(-1, 1)
    return chosen.unflatten(0, idx.shape).sum(1).to(rows.dtype)


def einsum(rows, w, idx):
    return torch.einsum("tkh,tk->th", rows[idx].to(w.dtype), w).to(rows.dtype)


def einsum_swapped(rows, w, idx):
    return torch.einsum("tk,tkh->th", w, rows.to(w.dtype)[idx]).to(rows.dtype)


def bmm(rows, w, idx):
    return torch.bmm(w.unsqueeze(1), rows[idx].to(w.dtype)).squeeze(1).to(rows.dtype)


def matmul(rows, w, idx):
    chosen = rows.index_select(0, idx.flatten()).view(*idx.shape, rows.shape[1]).to(w.dtype)
    return (chosen.transpose(1, 2) @ w.unsqueeze(-1)).squeeze(-1).to(rows.dtype)


def index_add(rows, w, idx):
    tokens, top_k = idx.shape
    token = torch.arange(tokens).repeat_interleave(top_k)
    weighed = rows.index_select(0, idx.view(-1)) * w.view(-1, 1)
    return torch.zeros(tokens, rows.shape[1], dtype=w.dtype).index_add(0, token, weighed).to(rows.dtype)


def index_add_divided(rows, w, idx):
    tokens, top_k = idx.shape
    token = torch.arange(tokens * top_k) // top_k
    out = torch.zeros(tokens, rows.shape[1], dtype=w.dtype)
    out.index_add_(0, token, w.view(-1, 1) * rows[idx.view(-1)])
    return out.to(rows.dtype)


def index_add_expanded(rows, w, idx):
    tokens, top_k = idx.shape
    token = torch.arange(tokens)[:, None].expand(-1, top_k).reshape(-1)
    out = rows.new_zeros(tokens, rows.shape[1], dtype=w.dtype)
    return out.index_add(0, token, (rows.to(w.dtype)[idx] * w[..., None]).flatten(0, 1)).to(rows.dtype)


def op(rows, w, idx):
    return torch.ops.k3.finalize(rows, w, idx)


def where_after(rows, w, idx):
    weighed = rows.index_select(0, idx.clamp(min=0).flatten()).view(*idx.shape, rows.shape[1]) * w.unsqueeze(
        -1
    )
    return torch.where((idx >= 0).unsqueeze(-1), weighed, 0.0).sum(1).to(rows.dtype)


def where_before(rows, w, idx):
    chosen = torch.where((idx < 0)[..., None], 0.0, rows[idx.clamp_min(0)])
    return (chosen * torch.where(idx < 0, 0.0, w)[..., None]).sum(1).to(rows.dtype)


def filled(rows, w, idx):
    weighed = rows[torch.where(idx >= 0, idx, 0)] * w[..., None]
    return weighed.masked_fill(~(idx > -1)[..., None], 0).sum(1).to(rows.dtype)


def multiplied(rows, w, idx):
    here = (idx >= 0).to(w.dtype)
    return (rows[idx.clamp(min=0)] * w[..., None] * here[..., None]).sum(1).to(rows.dtype)


def multiplied_weights(rows, w, idx):
    return (rows[idx.clamp(min=0)] * (w * (idx >= 0))[..., None]).sum(1).to(rows.dtype)


WHOLE = (
    *(select, fancy, fancy_flat, einsum, einsum_swapped, bmm, matmul),
    *(index_add, index_add_divided, index_add_expanded, op),
)
WITH_HOLES = (op, where_after, where_before, filled)
ZEROED = (multiplied, multiplied_weights)  # a hole reads row 0, times zero


def built_in(y, w):
    return F.rms_norm(y, (y.shape[-1],), w, EPS)


def k3_norm(y, w):
    return torch.ops.k3.rms_norm(y, w, EPS)


def hugging_face(y, w):
    wide = y.to(acc(y.dtype))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return w * wide.to(y.dtype)


def by_root(y, w):
    wide = y.to(acc(y.dtype))
    scale = (torch.square(wide).mean(-1, True) + EPS).sqrt()
    return (wide / scale * w).to(y.dtype)


def by_sum(y, w):
    wide = y.to(acc(y.dtype))
    scale = ((wide * wide).sum(-1, keepdim=True) / y.shape[-1] + EPS) ** -0.5
    return ((scale * wide) * w.to(wide.dtype)).to(y.dtype)


NORMS = (built_in, k3_norm, hugging_face, by_root, by_sum)


def linear(y, w):
    return F.linear(y, w.to(y.dtype))


def transposed(y, w):
    return torch.mm(y, w.transpose(0, 1))


def other_layout(y, w):
    """The weight is kept [L, D]."""
    return y @ w.t().clone()


UPS = (linear, transposed, other_layout)


def tail(finalize: Callable, norm: Callable = built_in, up: Callable = linear, group: str = "") -> Callable:
    """The tail as a function of :class:`Args`."""

    def forward(rows, w, idx, norm_w, up_w, shared):
        y = reduce(finalize(rows, w, idx), group)
        return up(norm(y, norm_w), up_w) + reduce(shared, group)

    return forward


def reduce(x: Tensor, group: str) -> Tensor:
    if not group:
        return x
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", group))


def part(whole: Args, rank: int, ranks: int) -> Args:
    """What one rank has: every ``ranks``-th row, NaN and holes in place of the others, and its share of the
    shared expert, another one on each rank.
    """
    mine = whole.idx % ranks == rank
    rows = whole.rows.clone()
    rows[torch.arange(len(rows)) % ranks != rank] = torch.nan
    share = 2 * (rank + 1) / (ranks * (ranks + 1))
    return whole._replace(rows=rows, idx=torch.where(mine, whole.idx, -1), shared=whole.shared * share)


def summed(parts: list[Args]) -> Args:
    """The whole in float64, from the parts as they were rounded."""
    rows = torch.stack([p.rows.double().nan_to_num(0.0) for p in parts]).sum(0)
    idx = torch.stack([p.idx for p in parts]).amax(0)
    shared = torch.stack([p.shared.double() for p in parts]).sum(0)
    return float64(parts[0])._replace(rows=rows, idx=idx, shared=shared)
