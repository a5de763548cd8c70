"""Latent attention of a block of drafts: each row sees the whole context and the whole block.

    context   pages      tokens 0 ..< seen      read once for all rows of a block
    block     own rows   in no page             the later ones are seen as well as the earlier ones

The block's own rows come as an argument and are kept nowhere: drafting writes into no page, so it needs none.
T token rows, R requests, H heads, L latent, N pages of B tokens; n and r key widths without and with
position, v value width; ``seen`` [R] tokens before the block. No row past a context is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from .conv import extents, owners
from .mla import Row, fold, online_softmax, paging, unfold, widths
from .op import acc, op
from .samples import Draw


@op(opaque=True)
def mla_attend_block(
    q: Tensor, kv_b: Tensor, pages: Tensor, table: Tensor, seen: Tensor, cu: Tensor, own: Tensor, scale: float
) -> Tensor:
    """Attention of blocks of a few rows to the paged context before them and to all of their own block.

    q [T, H, n+r], kv_b [H*(n+v), L], pages [N, B, L+r], table [R, P], seen [R], cu [R+1], own [T, L+r]
    -> o [T, H, v] like q. Token rows past cu[-1] are not read and come back zero.
    """
    heads, (nope, _, value) = q.shape[1], widths(q, kv_b, pages)
    bounds, before = cu.tolist(), seen.tolist()
    out = q.new_empty(q.shape[0], heads, value)
    out[bounds[-1] :] = 0.0
    rows = [Row(r, a, b - a, s) for r, ((a, b), s) in enumerate(zip(pairwise(bounds), before)) if b > a]
    if not rows:
        return out
    rows.sort(key=lambda row: -row.seen)
    kv = kv_b.to(acc(q.dtype)).view(heads, nope + value, kv_b.shape[1])
    folded = fold(q, kv, rows, scale, pages.shape[2])
    start = over_block(folded.query, own[folded.tokens].to(kv.dtype), folded.count, kv.shape[2])
    past = [(row.request, row.seen) for row in rows]
    limit = torch.tensor([row.seen for row in rows], device=q.device).unsqueeze(1)  # [R, 1]
    limit = limit.expand(-1, folded.query.shape[1])
    unfold(online_softmax(folded.query, limit, past, pages, table, kv.shape[2], start), kv, folded, out)
    return out


def over_block(query: Tensor, own: Tensor, count: Tensor, latent: int) -> tuple[Tensor, Tensor, Tensor]:
    """Peak, sum of weights, weighted latents of query [R, Q, L+r] over ``count`` rows of own [R, k, L+r]."""
    scores = torch.bmm(query, own.mT)  # [R, Q, k]
    behind = torch.arange(own.shape[1], device=own.device) >= count
    scores.masked_fill_(behind.unsqueeze(1), -torch.inf)
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    return top, weights.sum(-1, keepdim=True), torch.bmm(weights, own[..., :latent])


@mla_attend_block.opened
def _(
    q: Tensor, kv_b: Tensor, pages: Tensor, table: Tensor, seen: Tensor, cu: Tensor, own: Tensor, scale: float
) -> Tensor:
    """Every request padded to all token rows and to all pages of its table, expanded."""
    heads, (nope, rope, value) = q.shape[1], widths(q, kv_b, pages)
    tokens, requests, most = q.shape[0], table.shape[0], table.shape[1] * pages.shape[1]
    latent, wide, queries = kv_b.shape[1], acc(q.dtype), tokens + 2  # never 1: Inductor asks for that
    begin, count = extents(cu, requests)
    at, query = torch.arange(most, device=q.device), torch.arange(queries, device=q.device)
    which = (begin.unsqueeze(1) + query).clamp(max=tokens)  # [R, queries], the padding row where it has none
    past, later = at >= seen.unsqueeze(1), query >= count.unsqueeze(1)
    block = torch.cat([own.to(wide), own.new_zeros(1, latent + rope, dtype=wide)])[which]
    known = torch.cat(
        [
            torch.where(past.unsqueeze(2), 0.0, pages[table].to(wide).flatten(1, 2)),
            torch.where(later.unsqueeze(2), 0.0, block),
        ],
        1,
    )  # [R, c + queries, L+r]
    both = torch.matmul(known[..., :latent], kv_b.to(wide).t())
    both = both.view(requests, most + queries, heads, nope + value)
    shared = known[:, :, None, latent:].expand(-1, -1, heads, -1)
    keys = torch.cat([both[..., :nope], shared], -1).permute(0, 2, 3, 1)  # [R, H, n+r, c + queries]
    asked = torch.cat([q.to(wide), q.new_zeros(1, heads, nope + rope, dtype=wide)])[which]
    hidden = torch.cat([past, later], 1).unsqueeze(1)
    mixed = []
    for head in range(heads):  # one product for all heads would mix R with H, which Inductor guards on
        scores = torch.bmm(asked[:, :, head], keys[:, head]) * scale  # [R, queries, c + queries]
        weights = torch.where(hidden, -torch.inf, scores).softmax(-1)
        mixed.append(torch.bmm(weights, both[:, :, head, nope:]))
    row, place, owned = owners(cu, tokens, requests)
    nobody = q.new_zeros(1, queries, heads, value, dtype=wide)  # for an R of 0
    result = torch.cat([torch.stack(mixed, 2), nobody])[row, place]  # [T, H, v]
    return torch.where(owned[:, None, None], result, 0.0).to(q.dtype)


@mla_attend_block.fake
def _(q, kv_b, pages, table, seen, cu, own, scale):
    return q.new_empty(q.shape[0], q.shape[1], widths(q, kv_b, pages)[2])


@mla_attend_block.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    draw, size, heads, nope, rope, value, latent = Draw(dtype), 4, 3, 8, 4, 6, 16
    for lengths, seen in (
        ([], []),
        ([0], [3]),
        ([1], [0]),
        ([7, 7, 7], [30, 0, 9]),
        ([5, 0, 1, 8], [3, 2, 40, 0]),
    ):
        pages = draw.normal(40, size, latent + rope)
        q = draw.normal(sum(lengths), heads, 2 * (nope + rope))[..., : nope + rope]
        kv_b = draw.normal(heads * (nope + value), latent) * latent**-0.5
        places = paging(draw, lengths, seen, 40, size)
        yield q, kv_b, pages, *places, draw.normal(sum(lengths), latent + rope), (nope + rope) ** -0.5
