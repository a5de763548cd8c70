"""Latent attention where every token's row lies on one rank of several: each attends to what it has.

    tokens of a text     0 1 2 3 4 5 6 7 8 9        2 ranks, an interleave of 1, pages of 4 tokens
    rank 0, page rows    0 2 | 4 6 | 8              a page is B // ranks rows here; numbers are all ranks'
    rank 1, page rows    1 3 | 5 7 | 9

    q of all heads, on every rank   ->   o over the own rows, lse     merged over ranks by lse_merge

Queries come absorbed (mla_absorb) and stay latent. A query sees ``local_length`` of what it sees in all, so
each row of a verify has its own end. T token rows, R requests, H heads of all ranks, L latent, N pages of b
rows here; ``place`` [3] as context_place gives it, ``seen`` [R] tokens before this step, on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from .context_place import local_index, local_length, owner
from .conv import extents, of_owner, owners
from .mla import ABSORBED_GROUPS, BLOCK_ELEMENTS, Row, fetch, paging
from .op import acc, op
from .samples import Draw


@op(writes=("pages",), opaque=True)
def mla_write_shard(
    latent: Tensor, pages: Tensor, table: Tensor, seen: Tensor, cu: Tensor, place: Tensor
) -> None:
    """Put this rank's tokens of latent [T, L+r] into pages(a!) [N, b, L+r], rounded to their dtype; the
    others' rows are written nowhere.
    """
    own, page, at = cells(latent.shape[0], pages, table, seen, cu, place)
    chosen = own.nonzero().squeeze(1)
    pages.index_put_((page[chosen], at[chosen]), latent.index_select(0, chosen).to(pages.dtype))


def cells(
    tokens: int, pages: Tensor, table: Tensor, seen: Tensor, cu: Tensor, place: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of every token row: whether its latents belong here, and the page and the row of it where they
    go, (0, 0) where not. No shape depends on data.
    """
    row, nth, owned = owners(cu, tokens, table.shape[0])
    token = of_owner(seen, row) + nth
    own = owned & (owner(token, place) == place[0])
    index = torch.where(own, local_index(token, place), 0)
    cell = torch.where(own, row * table.shape[1] + index // pages.shape[1], 0)
    page = torch.where(own, of_owner(table.flatten(), cell), 0).long()
    return own, page, index % pages.shape[1]


@mla_write_shard.opened
def _(latent: Tensor, pages: Tensor, table: Tensor, seen: Tensor, cu: Tensor, place: Tensor) -> None:
    own, page, at = cells(latent.shape[0], pages, table, seen, cu, place)
    rows = torch.where(own.unsqueeze(1), latent, 0.0)  # the null page takes a zero for what belongs elsewhere
    pages.index_put_((page, at), rows.to(pages.dtype))


@mla_write_shard.fake
def _(latent: Tensor, pages: Tensor, table: Tensor, seen: Tensor, cu: Tensor, place: Tensor) -> None:
    return None


@mla_write_shard.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    draw, size, width = Draw(dtype), 4, 12
    for lengths, seen, place in (
        ([], [], (1, 2, 1)),
        ([0], [3], (0, 4, 1)),
        ([1], [0], (0, 2, 2)),
        ([1], [0], (1, 2, 2)),
        ([5, 0, 1, 18], [3, 2, 4, 0], (1, 2, 1)),
        ([5, 0, 1, 18], [3, 2, 4, 0], (2, 4, 2)),
    ):
        pages = draw.normal(24, size, width)
        pages[0, 0] = 0.0
        where = paging(draw, lengths, seen, 24, size * place[1])
        yield draw.normal(sum(lengths), width), pages, *where, torch.tensor(place)


@op(opaque=True)
def mla_attend_shard(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    seen: Tensor,
    cu: Tensor,
    place: Tensor,
    latent: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Causal attention of absorbed queries to this rank's rows of the paged context.

    q [H, T, L+r], pages [N, b, L+r], table [R, P], seen [R], cu [R+1], place [3], latent = L
    -> (o [H, T, L] acc, lse [H, T] acc, of natural logarithm). A query that has no row here, and a token row
    past cu[-1], which is not read, gets o = 0 and lse = -inf. Requests whose token rows are past T wait.
    """
    heads, tokens = q.shape[:2]
    o = q.new_zeros(heads, tokens, latent, dtype=acc(q.dtype))
    lse = torch.full((heads, tokens), -torch.inf, dtype=o.dtype, device=q.device)
    limit = visible(tokens, seen, cu, place)
    bounds, before = cu.tolist(), seen.tolist()
    rows = [
        Row(r, a, b - a, s) for r, ((a, b), s) in enumerate(zip(pairwise(bounds), before)) if a < b <= tokens
    ]
    longest = limit.tolist()
    here = [row for row in pieces(rows) if longest[row.begin + row.count - 1]]
    least = 1
    for most in ABSORBED_GROUPS:
        alike = [row for row in here if least <= row.count <= most]
        alike.sort(key=lambda row: -longest[row.begin + row.count - 1])
        together = max(1, BLOCK_ELEMENTS // (most * heads * q.shape[2]))
        for first in range(0, len(alike), together):
            attend(q, pages, table, alike[first : first + together], limit, scale, o, lse)
        least = most + 1
    return o, lse


def visible(tokens: int, seen: Tensor, cu: Tensor, place: Tensor) -> Tensor:
    """[T] of this rank's tokens, how many the query of each token row sees; any where it is nobody's."""
    row, nth, _ = owners(cu, tokens, seen.shape[0])
    return local_length(of_owner(seen, row) + nth + 1, place)


def pieces(rows: Iterable[Row]) -> Iterator[Row]:
    """Rows cut to so few queries that their scores over a block of context fit; each keeps its own ends."""
    most = ABSORBED_GROUPS[-1]
    for row in rows:
        for first in range(0, row.count, most):
            yield Row(row.request, row.begin + first, min(most, row.count - first), row.seen + first)


def attend(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    rows: list[Row],
    limit: Tensor,
    scale: float,
    o: Tensor,
    lse: Tensor,
) -> None:
    """Rows of about the same few queries, longest local context first, which is nowhere empty; fills their
    part of o [H, T, L] and lse [H, T].
    """
    heads, most = q.shape[0], max(row.count for row in rows)
    numbers = torch.tensor([(row.begin, row.count) for row in rows], device=q.device)
    begin, count = numbers.unsqueeze(2).unbind(1)  # [R, 1] each
    nth = torch.arange(most, device=q.device)
    tokens = begin + torch.minimum(nth, count - 1)  # [R, most], padded with the last
    picked = q.index_select(1, tokens.view(-1)).to(o.dtype) * scale
    query = picked.view(heads, *tokens.shape, -1).permute(1, 0, 2, 3).flatten(1, 2)  # [R, H * most, L+r]
    top, total, mixed = over_context(query, limit[tokens].repeat(1, heads), pages, table, rows, o.shape[2])
    own = (nth < count).view(-1)
    mean = mixed / torch.where(total == 0.0, 1.0, total)
    for out, value in ((o, mean), (lse, (top + total.log()).squeeze(2))):
        by_head = value.unflatten(1, (heads, most)).transpose(0, 1).flatten(1, 2)  # [H, R * most, ..]
        out.index_copy_(1, tokens.view(-1)[own], by_head[:, own])


def over_context(
    query: Tensor, limit: Tensor, pages: Tensor, table: Tensor, rows: list[Row], latent: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Peak and sum of exponentials [R, Q, 1] and weighted latents [R, Q, L] of query [R, Q, L+r], each over
    its first ``limit`` [R, Q] local tokens, which may be none; block by block.
    """
    context = limit.amax(1, keepdim=True)  # [R, 1]
    ends = context.squeeze(1).tolist()
    most, wide = ends[0], max(query.shape[1:])
    step = max(pages.shape[1], BLOCK_ELEMENTS // (len(rows) * wide))
    top = query.new_full((*query.shape[:2], 1), -torch.inf)
    total, mixed = torch.zeros_like(top), query.new_zeros(*query.shape[:2], latent)
    for first in range(0, most, step):
        here = [row.request for row, end in zip(rows, ends) if end > first]
        n = len(here)
        tokens = torch.arange(first, min(first + step, most), device=query.device)
        known = fetch(pages, table, here, torch.minimum(tokens, context[:n] - 1)).to(query.dtype)
        scores = torch.bmm(query[:n], known.mT)
        scores.masked_fill_(tokens >= limit[:n, :, None], -torch.inf)
        peak = torch.maximum(top[:n], scores.amax(-1, keepdim=True))
        base = torch.where(peak == -torch.inf, 0.0, peak)  # nothing seen yet: -inf - -inf would be NaN
        weights = scores.sub_(base).exp_()
        fade = (top[:n] - base).exp_()
        total[:n] = total[:n] * fade + weights.sum(-1, keepdim=True)
        mixed[:n] = torch.baddbmm(mixed[:n] * fade, weights, known[..., :latent])
        top[:n] = peak
    return top, total, mixed


@mla_attend_shard.opened
def _(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    seen: Tensor,
    cu: Tensor,
    place: Tensor,
    latent: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Every request padded to all token rows and to all pages of its table."""
    (heads, tokens, width), requests = q.shape, table.shape[0]
    most, wide, queries = table.shape[1] * pages.shape[1], acc(q.dtype), tokens + 2  # never 1: Inductor asks
    begin, count = extents(cu, requests)
    at, query = torch.arange(most, device=q.device), torch.arange(queries, device=q.device)
    end = local_length(seen + count, place).unsqueeze(1)
    known = torch.where((at < end).unsqueeze(2), pages[table].to(wide).flatten(1, 2), 0.0)  # [R, c, L+r]
    which = (begin.unsqueeze(1) + query).clamp(max=tokens)  # [R, queries], the padding row where it has none
    limit = local_length(seen.unsqueeze(1) + query + 1, place)
    hidden = at >= limit.unsqueeze(2)  # [R, queries, c]
    padded = torch.cat([q.to(wide) * scale, q.new_zeros(heads, 1, width, dtype=wide)], 1)
    row, nth, owned = owners(cu, tokens, requests)
    nobody = q.new_zeros(1, queries, latent + 1, dtype=wide)  # for an R of 0
    found = []
    for head in range(heads):  # one product for all heads would mix R with H, which Inductor guards on
        scores = torch.where(hidden, -torch.inf, torch.bmm(padded[head][which], known.mT))
        nothing = scores.new_full((*scores.shape[:2], 1), -torch.inf)  # for a c of 0
        peak = torch.cat([scores, nothing], 2).amax(2, keepdim=True)
        weights = (scores - torch.where(peak == -torch.inf, 0.0, peak)).exp()
        total = weights.sum(2, keepdim=True)
        mean = torch.bmm(weights, known[..., :latent]) / torch.where(total == 0.0, 1.0, total)
        found.append(torch.cat([torch.cat([mean, peak + total.log()], 2), nobody])[row, nth])  # [T, L+1]
    both = torch.stack(found)
    o = torch.where(owned[:, None], both[..., :latent], 0.0)
    return o, torch.where(owned, both[..., latent], -torch.inf)


@mla_attend_shard.fake
def _(q, pages, table, seen, cu, place, latent, scale):
    o = q.new_empty(*q.shape[:2], latent, dtype=acc(q.dtype))
    return o, o.new_empty(q.shape[:2])


@mla_attend_shard.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    draw, size, heads, rope, latent = Draw(dtype), 4, 3, 4, 16
    for lengths, seen, place in (
        ([], [], (1, 2, 1)),
        ([0], [3], (1, 2, 1)),
        ([1], [0], (0, 4, 1)),
        ([1, 1], [30, 7], (1, 2, 4)),
        ([5, 0, 1, 20], [3, 2, 40, 6], (2, 4, 1)),
        ([19], [30], (3, 4, 2)),
    ):
        pages = draw.normal(40, size, latent + rope)
        q = draw.normal(heads, sum(lengths), 2 * (latent + rope))[..., : latent + rope]
        where = paging(draw, lengths, seen, 40, size * place[1])
        yield q, pages, *where, torch.tensor(place), latent, (latent + rope) ** -0.5
