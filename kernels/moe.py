"""Mixture of experts: choose, compute each chosen expert, put the results together again.

    route                 x -> weights, ids           sigmoid scores, a bias for the choice only
    experts_unfinalized   z, ids -> rows, idx         rows grouped by expert, not weighted
    finalize              rows, weights, idx -> y     y[t] = sum_j weights[t, j] rows[idx[t, j]]

T token rows, D width, L latent, E experts, I inner, k chosen experts a token, N rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from .mxfp4 import pack, unpack, unpack_traceable
from .op import acc, acc_of, op
from .samples import Draw
from .situ import situ_wide

EXPERT_BLOCK = 32  # rows of one expert that an opened graph multiplies together


@op()
def route(
    x: Tensor, gate_w: Tensor, bias: Tensor, top_k: int, scale: float, renormalize: bool
) -> tuple[Tensor, Tensor]:
    """x [T, D], gate_w [E, D], bias [E] acc -> (weights [T, k] acc, ids [T, k] int64).

    Written tie rule: the larger sigmoid + bias first, compared in float32 whatever the model; equal ones by
    the lower expert id. Scores are computed in float64 and then rounded, so that a row chooses alike in any
    batch and equal logits tie at any place: products and float32 sigmoids differ in their last bit between
    whole vectors and what is left over. A row of NaN gets experts 0 .. k-1 with NaN weights, and no other row
    notices.
    """
    logits = F.linear(x.to(torch.float64), gate_w.to(torch.float64))
    scores = torch.sigmoid(logits).to(acc(x.dtype))
    choice = scores.to(torch.float32) + bias.to(torch.float32)
    order = torch.sort(choice, dim=-1, descending=True, stable=True).indices
    ids = order[:, :top_k].contiguous()
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, ids


@route.fake
def _(x, gate_w, bias, top_k, scale, renormalize):
    tokens = x.shape[0]
    return x.new_empty(tokens, top_k, dtype=acc(x.dtype)), x.new_empty(tokens, top_k, dtype=torch.int64)


@route.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    draw = Draw(dtype)
    for tokens in (0, 1, 9):
        yield draw.normal(tokens, 24), draw.normal(10, 24), draw.normal_acc(10) * 0.1, 3, 2.446, True
    yield (
        draw.normal(4, 48)[:, 8:32],
        torch.zeros(6, 24, dtype=dtype),
        torch.zeros(6, dtype=draw.wide),
        2,
        1.0,
        False,
    )


def each_expert(z: Tensor, ids: Tensor, num_experts: int, one: Callable[[int, Tensor], Tensor]) -> tuple:
    """Run ``one(expert, its rows)`` for every expert present; results grouped by expert, then holes."""
    tokens, top_k = ids.shape
    holes, *counts = torch.bincount((ids.clamp(min=-1) + 1).flatten(), minlength=num_experts + 1).tolist()
    assert len(counts) == num_experts, f"expert {len(counts) - 1} of {num_experts}"
    order = torch.sort(torch.where(ids < 0, num_experts, ids).flatten(), stable=True).indices
    here = tokens * top_k - holes
    place = torch.empty_like(order, dtype=torch.int32)
    place[order] = torch.arange(tokens * top_k, dtype=torch.int32, device=z.device)
    idx = place.view(tokens, top_k)
    if holes:
        idx = idx.masked_fill(idx >= here, -1)
    rows = z.new_empty(tokens * top_k, z.shape[1])
    rows[here:] = 0.0
    source = z.index_select(0, order // top_k)
    begin = 0
    for expert, count in enumerate(counts):
        if count:
            end = begin + count
            rows[begin:end] = one(expert, source[begin:end])
            begin = end
    return rows, idx


def mlp(z: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, beta: float, linear_beta: float) -> Tensor:
    """One expert, w2 situ(w1 z, w3 z): sums in acc; the inner activation and the result have z's dtype."""
    wide = acc_of(z)
    inner = situ_wide(F.linear(wide, w1), F.linear(wide, w3), beta, linear_beta).to(z.dtype)
    return F.linear(acc_of(inner), w2).to(z.dtype)


@op(opaque=True)
def experts_unfinalized(
    z: Tensor,
    ids: Tensor,
    w1: Tensor,
    w1_scale: Tensor,
    w3: Tensor,
    w3_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    beta: float,
    linear_beta: float,
) -> tuple[Tensor, Tensor]:
    """MXFP4 experts.  z [T, L], ids [T, k] (-1: not here) -> (rows [T*k, L], idx [T, k] int32, -1: not here).

    w1, w3 uint8 [E, I, L/2], w2 uint8 [E, L, I/2], scales uint8 with 1/16 of the columns. Rows that no idx
    names are zero.
    """
    wide = acc(z.dtype)

    def one(e: int, rows: Tensor) -> Tensor:
        gate, up = unpack(w1[e], w1_scale[e], wide), unpack(w3[e], w3_scale[e], wide)
        return mlp(rows, gate, up, unpack(w2[e], w2_scale[e], wide), beta, linear_beta)

    return each_expert(z, ids, w1.shape[0], one)


@experts_unfinalized.fake
def _(z, ids, w1, w1_scale, w3, w3_scale, w2, w2_scale, beta, linear_beta):
    return unfinalized_like(z, ids)


@experts_unfinalized.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    draw, experts, latent, inner = Draw(dtype), 5, 64, 96
    gate, up = (pack(draw.exact(experts, inner, latent) * latent**-0.5) for _ in range(2))
    down = pack(draw.exact(experts, latent, inner) * inner**-0.5)
    for z, ids in tokens_and_experts(draw, experts, latent):
        yield z, ids, *gate, *up, *down, 4.0, 25.0


def tokens_and_experts(draw: Draw, experts: int, latent: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(z, ids): none, one, many, and many with holes."""
    for tokens in (0, 1, 9):
        yield draw.normal(tokens, latent), draw.below(experts, tokens, 2)
    yield draw.normal(5, 2 * latent)[:, :latent], draw.below(experts + 1, 5, 3) - 1


@op(opaque=True)
def experts_unfinalized_dense(
    z: Tensor, ids: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, beta: float, linear_beta: float
) -> tuple[Tensor, Tensor]:
    """The same with unquantised weights w1, w3 [E, I, L] and w2 [E, L, I]."""
    wide = acc(z.dtype)

    def one(e: int, rows: Tensor) -> Tensor:
        return mlp(rows, w1[e].to(wide), w3[e].to(wide), w2[e].to(wide), beta, linear_beta)

    return each_expert(z, ids, w1.shape[0], one)


@experts_unfinalized_dense.fake
def _(z, ids, w1, w3, w2, beta, linear_beta):
    return unfinalized_like(z, ids)


@experts_unfinalized_dense.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    draw, experts, latent, inner = Draw(dtype), 5, 24, 40
    w1, w3 = (draw.normal(experts, inner, latent) * latent**-0.5 for _ in range(2))
    w2 = draw.normal(experts, latent, inner) * inner**-0.5
    for z, ids in tokens_and_experts(draw, experts, latent):
        yield z, ids, w1, w3, w2, 0.0, 0.0


@experts_unfinalized.opened
def _(z, ids, w1, w1_scale, w3, w3_scale, w2, w2_scale, beta, linear_beta):
    def weights(experts: Tensor) -> list[Tensor]:
        pairs = ((w1, w1_scale), (w3, w3_scale), (w2, w2_scale))
        picked = ([part.index_select(0, experts) for part in pair] for pair in pairs)
        return [unpack_traceable(*pair, acc(z.dtype)) for pair in picked]

    return by_blocks(z, ids, w1.shape[0], weights, beta, linear_beta)


@experts_unfinalized_dense.opened
def _(z, ids, w1, w3, w2, beta, linear_beta):
    def weights(experts: Tensor) -> list[Tensor]:
        return [acc_of(w.index_select(0, experts)) for w in (w1, w3, w2)]

    return by_blocks(z, ids, w1.shape[0], weights, beta, linear_beta)


def by_blocks(
    z: Tensor,
    ids: Tensor,
    num_experts: int,
    weights: Callable[[Tensor], list[Tensor]],
    beta: float,
    linear_beta: float,
) -> tuple[Tensor, Tensor]:
    """Rows sorted by expert, padded to blocks of one expert each, and multiplied block by block.

    No shape depends on the data: N rows fill at most min(N, N // 32 + E) blocks. One more takes the holes.
    """
    tokens, top_k = ids.shape
    count, device = tokens * top_k, z.device
    keys, order = torch.sort(torch.where(ids < 0, num_experts, ids).flatten(), stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(count, device=device))
    idx = torch.where(ids < 0, -1, place.unflatten(0, (tokens, top_k))).to(torch.int32)

    here = keys < num_experts
    each = (keys.unsqueeze(1) == torch.arange(num_experts, device=device)).sum(0)  # [E] rows of an expert
    last = ((each + EXPERT_BLOCK - 1) // EXPERT_BLOCK).cumsum(0)  # [E] block after an expert's own
    ahead = (last - (each + EXPERT_BLOCK - 1) // EXPERT_BLOCK) * EXPERT_BLOCK - (each.cumsum(0) - each)
    blocks = torch.sym_min(count, count // EXPERT_BLOCK + num_experts) + 1
    shift = ahead.index_select(0, torch.where(here, keys, 0))
    spot = torch.where(here, torch.arange(count, device=device) + shift, (blocks - 1) * EXPERT_BLOCK)
    expert = torch.searchsorted(last, torch.arange(blocks, device=device), right=True)
    w1, w3, w2 = weights(expert.clamp(max=num_experts - 1))

    source = acc_of(z.index_select(0, order // top_k))
    x = source.new_zeros(blocks * EXPERT_BLOCK, z.shape[1]).index_put((spot,), source)
    x = x.view(blocks, EXPERT_BLOCK, z.shape[1])
    inner = situ_wide(torch.bmm(x, w1.mT), torch.bmm(x, w3.mT), beta, linear_beta).to(z.dtype)
    rows = torch.bmm(acc_of(inner), w2.mT).to(z.dtype).flatten(0, 1).index_select(0, spot)
    return torch.where(here.unsqueeze(1), rows, 0.0), idx


def unfinalized_like(z: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Shapes of the two results."""
    return z.new_empty(ids.shape[0] * ids.shape[1], z.shape[1]), ids.new_empty(ids.shape, dtype=torch.int32)


@op()
def finalize(rows: Tensor, w: Tensor, idx: Tensor) -> Tensor:
    """y[t] = sum_j w[t, j] rows[idx[t, j]], idx -1 skipped.  rows [N, L], w [T, k] acc, idx [T, k] -> [T, L].

    Sums in acc with one rounding. A skipped entry reads nothing: neither a row nor its weight.
    """
    absent = idx < 0
    known = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    at = torch.where(absent, rows.shape[0], idx.to(torch.int64))
    weight = torch.where(absent, 0.0, w)
    gathered = acc_of(known[at])  # [T, k, L]
    return (gathered * weight.unsqueeze(-1)).sum(1).to(rows.dtype)


@finalize.fake
def _(rows: Tensor, w: Tensor, idx: Tensor) -> Tensor:
    return rows.new_empty(idx.shape[0], rows.shape[1])


@finalize.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    draw = Draw(dtype)
    for tokens, count in ((0, 0), (1, 2), (7, 30)):
        yield (
            draw.normal(count, 24),
            draw.fraction(tokens, 4),
            draw.below(count + 1, tokens, 4, dtype=torch.int32) - 1,
        )
    yield draw.normal(0, 24), draw.fraction(3, 2), torch.full((3, 2), -1, dtype=torch.int32)
