"""The latent tail over n ranks, in three ways that differ in what is read and sent: by the number of rows.

    fused      y --all-reduce--> norm --D/n rows of up_w--+--all-gather--> out
               shared --reduce-scatter over columns-------'
    overlap    y --all-reduce--> norm --all of up_w-------+--> out
               shared --all-reduce------------------------'
    column     y --all-reduce--> norm --D/n rows of up_w--> into these columns of shared --all-reduce--> out

Few rows wait for the weight, so each rank reads its part alone; many wait for the multiplications and for
messages, so each rank computes its part alone and nothing is gathered. In between the whole product runs
while the shared part travels. Every rank has the same rows, so all choose alike.

What travels has the model's dtype. Values are rounded to it where the unfused layer rounds: y, its norm with
the gain, its product and the sum; the column tier alone adds the product before it is rounded.

T token rows, k experts a token, N rows of experts, L latent, D width, n ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .groups import place_in, ranks_of
from .latent_tail import finalized, latent_tail, normed, readable
from .op import acc_of

FUSED_TOKENS = 128  # the most rows vLLM 0.33 gives the one kernel of its tail
OVERLAP_TOKENS = 256  # the most rows for which it multiplies the whole weight beside the shared sum
BY_ROWS = f"tier by token count: fused <= {FUSED_TOKENS}, overlap <= {OVERLAP_TOKENS}, column beyond"
ops = torch.ops._c10d_functional


def tier(tokens: int) -> str:
    """Which of the three computes this many rows."""
    return "fused" if tokens <= FUSED_TOKENS else "overlap" if tokens <= OVERLAP_TOKENS else "column"


def several(rows, w, idx, norm_w, up_w, shared_partial, eps, group) -> str | None:
    """Why there is nothing to sum over ranks, or None."""
    ranks = ranks_of(group) if group else 1
    if ranks is None:
        return f"no process group is called {group}"
    return "nothing is summed over ranks" if ranks == 1 else None


def divided(rows, w, idx, norm_w, up_w, shared_partial, eps, group) -> str | None:
    """Why the weight cannot be dealt out by rows, or None."""
    alone = several(rows, w, idx, norm_w, up_w, shared_partial, eps, group)
    if alone is None and up_w.shape[0] % ranks_of(group):
        return f"a width of {up_w.shape[0]} does not divide by {ranks_of(group)} ranks"
    return alone


@latent_tail.impl("tiers", objection=divided, note=BY_ROWS)
def latent_tail_tiers(
    rows: Tensor,
    w: Tensor,
    idx: Tensor,
    norm_w: Tensor,
    up_w: Tensor,
    shared_partial: Tensor,
    eps: float,
    group: str,
) -> Tensor:
    """As the meaning, by the tier of this many rows."""
    compute = {"fused": fused, "overlap": overlap, "column": column}[tier(idx.shape[0])]
    return compute(rows, w, idx, norm_w, up_w, shared_partial, eps, group)


@latent_tail.impl("overlap", objection=several)
def overlap(
    rows: Tensor,
    w: Tensor,
    idx: Tensor,
    norm_w: Tensor,
    up_w: Tensor,
    shared_partial: Tensor,
    eps: float,
    group: str,
) -> Tensor:
    """Both sums are on their way before either is waited for, the shared one until the product is done."""
    y = sent(rows, w, idx, group)
    shared = ops.all_reduce(shared_partial.contiguous(), "sum", group)
    dtype = shared_partial.dtype
    up = F.linear(arrived(y, norm_w, eps, dtype), up_w.to(dtype))
    return up + ops.wait_tensor(shared)


@latent_tail.impl("fused", objection=divided)
def fused(
    rows: Tensor,
    w: Tensor,
    idx: Tensor,
    norm_w: Tensor,
    up_w: Tensor,
    shared_partial: Tensor,
    eps: float,
    group: str,
) -> Tensor:
    """The composite form of what one kernel may do: nothing outside sees anything but the result."""
    rank, ranks = place_in(group)
    tokens, width, dtype = idx.shape[0], up_w.shape[0], shared_partial.dtype
    share = width // ranks
    y = sent(rows, w, idx, group)
    by_rank = shared_partial.unflatten(1, (ranks, share)).transpose(0, 1)  # [n, T, D/n]
    by_rank = by_rank.contiguous().view(ranks * tokens, share)
    shared = ops.reduce_scatter_tensor(by_rank, "sum", ranks, group)
    up = F.linear(arrived(y, norm_w, eps, dtype), up_w[rank * share : (rank + 1) * share].to(dtype))
    mine = up + ops.wait_tensor(shared)
    parts = ops.wait_tensor(ops.all_gather_into_tensor(mine, ranks, group))
    out = shared_partial.new_empty(tokens, width)
    out.view(tokens, ranks, share).copy_(parts.view(ranks, tokens, share).transpose(0, 1))
    return out


@latent_tail.impl("column", objection=divided)
def column(
    rows: Tensor,
    w: Tensor,
    idx: Tensor,
    norm_w: Tensor,
    up_w: Tensor,
    shared_partial: Tensor,
    eps: float,
    group: str,
) -> Tensor:
    """A column of the shared part gets the product on one rank alone, so that the sum has it once."""
    rank, ranks = place_in(group)
    share, dtype = up_w.shape[0] // ranks, shared_partial.dtype
    own = slice(rank * share, (rank + 1) * share)
    y = sent(rows, w, idx, group, by_choice=True)
    partial = shared_partial.clone(memory_format=torch.contiguous_format)
    partial[:, own].addmm_(arrived(y, norm_w, eps, dtype), up_w[own].to(dtype).t())
    return ops.wait_tensor(ops.all_reduce_(partial, "sum", group))


def sent(rows: Tensor, w: Tensor, idx: Tensor, group: str, by_choice: bool = False) -> Tensor:
    """The sum over ranks of y [T, L] in rows' dtype, on its way.

    by_choice: one of a token's experts after the other, so that no [T, k, L] is made.
    """
    some, step = readable(rows), 1 if by_choice else max(idx.shape[1], 1)
    y = finalized(some, w[:, :step], idx[:, :step])
    for j in range(step, idx.shape[1], step):
        y += finalized(some, w[:, j : j + step], idx[:, j : j + step])
    return ops.all_reduce_(y.to(rows.dtype), "sum", group)


def arrived(y: Tensor, norm_w: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """The norm of a sum that is on its way, rounded to ``dtype``."""
    return normed(acc_of(ops.wait_tensor(y)), norm_w, eps).to(dtype)
