"""Latent attention over pages: write the rows of this step, then attend to everything up to each token.

    table[r]   [ 7 | 2 | 9 | 0 ]      pages of request r; token p is row p % B of page table[r, p // B]
    a row      [ latent L | k_pe r ]  shared by all heads; kv_b expands the latent to k_nope and v per head

T token rows, R requests, H heads, L latent, N pages of B tokens; ``seen`` [R] tokens before this step.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn import functional as F

from .conv import positions
from .op import acc, op


@op(writes=("pages",), opaque=True)
def mla_write(latent: Tensor, pages: Tensor, table: Tensor, seen: Tensor, cu: Tensor) -> None:
    """Put latent [T, L+r] into pages(a!) [N, B, L+r], rounded to the dtype of the pages."""
    bounds = cu.tolist()
    row, at = positions(bounds)
    token = seen[row] + at
    size = pages.shape[1]
    pages[table[row, token // size].long(), token % size] = latent[: bounds[-1]].to(pages.dtype)


@mla_write.fake
def _(latent: Tensor, pages: Tensor, table: Tensor, seen: Tensor, cu: Tensor) -> None:
    return None


@op(opaque=True)
def mla_attend(
    q: Tensor, kv_b: Tensor, pages: Tensor, table: Tensor, seen: Tensor, cu: Tensor, scale: float
) -> Tensor:
    """Causal attention of this step's tokens to the paged context, their own rows included.

    q [T, H, n+r], kv_b [H*(n+v), L], pages [N, B, L+r], table [R, P], seen [R], cu [R+1] -> o [T, H, v].
    """
    heads, (nope, rope, value) = q.shape[1], widths(q, kv_b, pages)
    wide, latent = acc(q.dtype), kv_b.shape[1]
    out = q.new_zeros(q.shape[0], heads, value)
    bounds, before = cu.tolist(), seen.tolist()
    for r, (begin, end) in enumerate(itertools.pairwise(bounds)):
        if begin == end:
            continue
        count = before[r] + end - begin
        token = torch.arange(count)
        rows = pages[table[r, token // pages.shape[1]].long(), token % pages.shape[1]].to(wide)
        kv = F.linear(rows[:, :latent], kv_b.to(wide)).view(count, heads, nope + value)
        pe = rows[:, None, latent:].expand(count, heads, rope)
        keys = torch.cat([kv[..., :nope], pe], -1)
        scores = torch.einsum("thd,shd->hts", q[begin:end].to(wide), keys) * scale
        hidden = token[None] > (before[r] + torch.arange(end - begin))[:, None]
        scores = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[begin:end] = torch.einsum("hts,shv->thv", scores, kv[..., nope:]).to(q.dtype)
    return out


def widths(q: Tensor, kv_b: Tensor, pages: Tensor) -> tuple[int, int, int]:
    """(n, r, v): key width without position, with position, value width of one head."""
    rope = pages.shape[2] - kv_b.shape[1]
    nope = q.shape[2] - rope
    return nope, rope, kv_b.shape[0] // q.shape[1] - nope


@mla_attend.fake
def _(q, kv_b, pages, table, seen, cu, scale):
    return q.new_empty(q.shape[0], q.shape[1], widths(q, kv_b, pages)[2])
