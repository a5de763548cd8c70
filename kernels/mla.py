"""Latent attention over pages: write the rows of this step, then attend to everything up to each token.

    table[r]   [ 7 | 2 | 9 | 0 ]      pages of request r; token p is row p % B of page table[r, p // B]
    a row      [ latent L | k_pe r ]  shared by all heads; kv_b [H, n+v, L] expands the latent per head

    absorbed   few queries: kv_b is applied to the query and to the result, the context stays latent
    expanded   many queries: keys and values of the context are made once for all of them

T token rows, R requests, H heads, L latent, N pages of B tokens; n and r key widths without and with
position, v value width; ``seen`` [R] tokens before this step. No row past a context is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .conv import extents, of_owner, owners
from .op import acc, op
from .samples import Draw, row_bounds

ABSORBED_GROUPS = (1, 16, 128)  # absorbed rows of up to so many queries are padded to each other
QUERY_BLOCK = 128  # queries of a long row that meet the context together, at least
BLOCK_ELEMENTS = 1 << 20  # scores, or context values, held at a time


@op(writes=("pages",), opaque=True)
def mla_write(latent: Tensor, pages: Tensor, table: Tensor, seen: Tensor, cu: Tensor) -> None:
    """Put latent [T, L+r] into pages(a!) [N, B, L+r], rounded to the dtype of the pages."""
    count = cu.diff()
    row = torch.repeat_interleave(torch.arange(len(count), device=cu.device), count)  # request of each token
    token = torch.arange(len(row), device=cu.device) + (seen - cu[:-1])[row]
    size = pages.shape[1]
    page = table[row, token // size].long()
    pages.index_put_((page, token % size), latent[: len(row)].to(pages.dtype))


@mla_write.opened
def _(latent: Tensor, pages: Tensor, table: Tensor, seen: Tensor, cu: Tensor) -> None:
    row, place, owned = owners(cu, latent.shape[0], table.shape[0])
    token = of_owner(seen, row) + place
    cell = torch.where(owned, row * table.shape[1] + token // pages.shape[1], 0)
    page = of_owner(table.flatten(), cell)
    at = torch.where(owned, token % pages.shape[1], 0)  # the null page takes what belongs to nobody
    pages.index_put_((torch.where(owned, page, 0), at), latent.to(pages.dtype))


@mla_write.fake
def _(latent: Tensor, pages: Tensor, table: Tensor, seen: Tensor, cu: Tensor) -> None:
    return None


@mla_write.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    draw, size, width = Draw(dtype), 4, 12
    for lengths, seen in (([], []), ([0], [3]), ([1], [0]), ([5, 0, 1, 18], [3, 2, 4, 0])):
        pages = draw.normal(24, size, width)
        yield draw.normal(sum(lengths), width), pages, *paging(draw, lengths, seen, 24, size)


def paging(draw: Draw, lengths: list[int], seen: list[int], pages: int, size: int) -> tuple:
    """(table, seen, cu) of rows that own different pages in no order."""
    need = [-(-(s + n) // size) for s, n in zip(seen, lengths)]
    free = draw.choice(sum(need), pages)
    table = torch.zeros(len(lengths), max(need, default=0) + 1, dtype=torch.int64)
    for row, owned in zip(table, free.split(need)):
        row[: len(owned)] = owned
    return table, torch.tensor(seen, dtype=torch.int64), row_bounds(lengths)


@op(opaque=True)
def mla_attend(
    q: Tensor, kv_b: Tensor, pages: Tensor, table: Tensor, seen: Tensor, cu: Tensor, scale: float
) -> Tensor:
    """Causal attention of this step's tokens to the paged context, their own rows included.

    q [T, H, n+r], kv_b [H*(n+v), L], pages [N, B, L+r], table [R, P], seen [R], cu [R+1] -> o [T, H, v]
    like q. Token rows past cu[-1] are not read and come back zero.
    """
    heads, (nope, _, value) = q.shape[1], widths(q, kv_b, pages)
    wide = acc(q.dtype)
    kv = kv_b.to(wide).view(heads, nope + value, kv_b.shape[1])
    bounds, before = cu.tolist(), seen.tolist()
    out = q.new_empty(q.shape[0], heads, value)
    out[bounds[-1] :] = 0.0
    rows = [Row(r, a, b - a, s) for r, ((a, b), s) in enumerate(zip(pairwise(bounds), before)) if b > a]
    attend_rows(q, kv, pages, table, rows, scale, out)
    return out


def attend_rows(
    q: Tensor, kv: Tensor, pages: Tensor, table: Tensor, rows: list[Row], scale: float, out: Tensor
) -> None:
    """Some rows of mla_attend, absorbed or expanded by their queries; kv [H, n+v, L] acc."""
    limit, least = absorbed_limit(kv.shape[2], kv.shape[1]), 1
    for most in ABSORBED_GROUPS:
        short = [row for row in rows if least <= row.count <= min(most, limit)]
        if short:
            absorbed(q, kv, pages, table, short, scale, out)
        least = most + 1
    for row in rows:
        if row.count > min(limit, ABSORBED_GROUPS[-1]):
            expanded(q, kv, pages, table, row, scale, out)


def absorbed_limit(latent: int, expanded_width: int) -> int:
    """Queries of a row up to which 2L products a key cost less than n + v and the expansion of that key."""
    return max(1, latent * expanded_width // max(1, 2 * latent - expanded_width))


class Row(NamedTuple):
    """One request of the step."""

    request: int
    begin: int  # first token row
    count: int  # token rows
    seen: int  # tokens before them

    @property
    def context(self) -> int:
        """Tokens its last query sees."""
        return self.seen + self.count


def widths(q: Tensor, kv_b: Tensor, pages: Tensor) -> tuple[int, int, int]:
    """(n, r, v) of a head."""
    rope = pages.shape[2] - kv_b.shape[1]
    nope = q.shape[2] - rope
    return nope, rope, kv_b.shape[0] // q.shape[1] - nope


def fetch(pages: Tensor, table: Tensor, requests: list[int], tokens: Tensor) -> Tensor:
    """Rows of the context: tokens [R, c] of each request -> [R, c, L+r]."""
    size = pages.shape[1]
    which = torch.tensor(requests, device=table.device).unsqueeze(1)
    page, at = table[which, tokens // size].long(), tokens % size
    if pages.stride(0) != size * pages.stride(1):
        return pages[page, at]
    return pages.flatten(0, 1).index_select(0, (page * size + at).view(-1)).view(*tokens.shape, -1)


def absorbed(
    q: Tensor, kv: Tensor, pages: Tensor, table: Tensor, rows: list[Row], scale: float, out: Tensor
) -> None:
    """Rows of about the same few queries, longest context first, over blocks of their context."""
    rows = sorted(rows, key=lambda row: -row.context)
    folded = fold(q, kv, rows, scale, pages.shape[2])
    context = torch.tensor([row.context for row in rows], device=q.device).unsqueeze(1)  # [R, 1]
    limit = context - folded.count + folded.place + 1  # [R, most] tokens a query sees
    limit = limit.repeat_interleave(q.shape[1], 1)  # [R, most * H]
    extents = [(row.request, row.context) for row in rows]
    unfold(online_softmax(folded.query, limit, extents, pages, table, kv.shape[2]), kv, folded, out)


class Folded(NamedTuple):
    """The few queries of each request as one matrix, padded with the last: its context is read once."""

    query: Tensor  # [R, most * H, L+r], kv_b applied and scaled
    tokens: Tensor  # [R, most] their token rows
    place: Tensor  # [R, most] 0, 1, .., count - 1, count - 1
    count: Tensor  # [R, 1]


def fold(q: Tensor, kv: Tensor, rows: list[Row], scale: float, width: int) -> Folded:
    """q [T, H, n+r], kv [H, n+v, L], rows of some queries each, width L+r of a page's row."""
    heads, latent, device = q.shape[1], kv.shape[2], q.device
    nope, most = q.shape[2] - (width - latent), max(row.count for row in rows)
    numbers = torch.tensor([(row.begin, row.count) for row in rows], device=device)
    begin, count = numbers.unsqueeze(2).unbind(1)  # [R, 1] each
    place = torch.minimum(torch.arange(most, device=device), count - 1)
    tokens = begin + place
    picked = q.index_select(0, tokens.view(-1)).to(kv.dtype) * scale  # [R * most, H, n+r]
    query = picked.new_empty(len(rows) * most, heads, width)
    query[..., :latent] = torch.bmm(picked[..., :nope].transpose(0, 1), kv[:, :nope]).transpose(0, 1)
    query[..., latent:] = picked[..., nope:]
    return Folded(query.view(len(rows), most * heads, width), tokens, place, count)


def unfold(mixed: Tensor, kv: Tensor, folded: Folded, out: Tensor) -> None:
    """Expand mixed [R, most * H, L] to values and put each query's into out [T, H, v]."""
    heads, value = out.shape[1:]
    most = folded.tokens.shape[1]
    mixed = mixed.view(-1, heads, kv.shape[2]).transpose(0, 1)  # [H, R * most, L]
    result = torch.bmm(mixed, kv[:, -value:].mT).transpose(0, 1).to(out.dtype)  # [R * most, H, v]
    tokens = folded.tokens.view(-1)
    if most > 1:
        keep = (torch.arange(most, device=out.device) < folded.count).view(-1)
        tokens, result = tokens[keep], result[keep]
    out.index_copy_(0, tokens, result)


def online_softmax(
    query: Tensor,
    limit: Tensor,
    extents: list[tuple[int, int]],
    pages: Tensor,
    table: Tensor,
    latent: int,
    start: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Softmax over each row's context, block by block, of its latents: [R, Q, L+r] -> [R, Q, L].

    limit [R, Q]: tokens a query sees. extents: (request, tokens) of each row, longest first. start: peak
    [R, Q, 1], sum of weights [R, Q, 1] and weighted latents [R, Q, L] of what was met before, changed.
    """
    most = extents[0][1]
    context = torch.tensor([tokens for _, tokens in extents], device=query.device).unsqueeze(1)
    step = max(pages.shape[1], BLOCK_ELEMENTS // (len(extents) * query.shape[2]))
    if start is None:
        top = query.new_full((*query.shape[:2], 1), -torch.inf)
        start = top, torch.zeros_like(top), query.new_zeros(*query.shape[:2], latent)
        alone = most <= step
    else:
        alone = False
    top, total, mixed = start
    for first in range(0, most, step):
        here = [request for request, tokens in extents if tokens > first]
        n = len(here)
        tokens = torch.arange(first, min(first + step, most), device=query.device)
        known = fetch(pages, table, here, torch.minimum(tokens, context[:n] - 1)).to(query.dtype)
        scores = torch.bmm(query[:n], known.mT)
        scores.masked_fill_(tokens >= limit[:n, :, None], -torch.inf)
        if alone:
            return torch.bmm(scores.softmax(-1), known[..., :latent])
        peak = torch.maximum(top[:n], scores.amax(-1, keepdim=True))
        weights = scores.sub_(peak).exp_()
        fade = (top[:n] - peak).exp_()
        total[:n] = total[:n] * fade + weights.sum(-1, keepdim=True)
        mixed[:n] = torch.baddbmm(mixed[:n] * fade, weights, known[..., :latent])
        top[:n] = peak
    return mixed.div_(total)


def expanded(
    q: Tensor, kv: Tensor, pages: Tensor, table: Tensor, row: Row, scale: float, out: Tensor
) -> None:
    """One row of many queries: some heads at a time, blocks of queries, no key past a block's last query."""
    heads, latent, device = q.shape[1], kv.shape[2], q.device
    nope = q.shape[2] - (pages.shape[2] - latent)
    known = fetch(pages, table, [row.request], torch.arange(row.context, device=device)[None])[0].to(kv.dtype)
    step = min(row.count, max(QUERY_BLOCK, BLOCK_ELEMENTS // row.context))
    together = min(heads, max(1, BLOCK_ELEMENTS // (step * row.context)))
    later = torch.ones(step, step, dtype=torch.bool, device=device).triu(1)
    for head in range(0, heads, together):
        group = slice(head, head + together)
        keys, values = expand(known, kv[group], nope)
        for first in range(0, row.count, step):
            last = min(first + step, row.count)
            visible, tokens = row.seen + last, slice(row.begin + first, row.begin + last)
            asked = q[tokens, group].to(kv.dtype).transpose(0, 1) * scale  # [h, c, n+r]
            scores = torch.bmm(asked, keys[:, :visible].mT)
            hidden = later[: last - first, : last - first]
            scores[..., row.seen + first :].masked_fill_(hidden, -torch.inf)
            out[tokens, group] = torch.bmm(scores.softmax(-1), values[:, :visible]).transpose(0, 1)


def expand(known: Tensor, kv: Tensor, nope: int) -> tuple[Tensor, Tensor]:
    """known [c, L+r], kv [h, n+v, L] -> keys [h, c, n+r] and values [h, c, v]."""
    heads, latent = kv.shape[0], kv.shape[2]
    both = torch.matmul(known[:, :latent], kv.mT)  # [h, c, n+v]
    shared = known[:, latent:].expand(heads, -1, -1)
    return torch.cat([both[..., :nope], shared], -1), both[..., nope:]


@mla_attend.opened
def _(
    q: Tensor, kv_b: Tensor, pages: Tensor, table: Tensor, seen: Tensor, cu: Tensor, scale: float
) -> Tensor:
    """Every request padded to all token rows and to all pages of its table, expanded."""
    heads, (nope, rope, value) = q.shape[1], widths(q, kv_b, pages)
    tokens, requests, most = q.shape[0], table.shape[0], table.shape[1] * pages.shape[1]
    latent, wide, queries = kv_b.shape[1], acc(q.dtype), tokens + 2  # never 1: Inductor asks for that
    begin, count = extents(cu, requests)
    at, query = torch.arange(most, device=q.device), torch.arange(queries, device=q.device)
    rows = pages[table].to(wide).flatten(1, 2)  # [R, c, L+r]
    known = torch.where((at < (seen + count).unsqueeze(1)).unsqueeze(2), rows, 0.0)
    both = torch.matmul(known[..., :latent], kv_b.to(wide).t()).view(requests, most, heads, nope + value)
    shared = known[:, :, None, latent:].expand(-1, -1, heads, -1)
    keys = torch.cat([both[..., :nope], shared], -1).permute(0, 2, 3, 1)  # [R, H, n+r, c]
    padded = torch.cat([q.to(wide), q.new_zeros(1, heads, nope + rope, dtype=wide)])
    asked = padded[(begin.unsqueeze(1) + query).clamp(max=tokens)]  # [R, queries, H, n+r]
    hidden = at > (seen.unsqueeze(1) + query).unsqueeze(2)
    mixed = []
    for head in range(heads):  # one product for all heads would mix R with H, which Inductor guards on
        scores = torch.bmm(asked[:, :, head], keys[:, head]) * scale  # [R, queries, c]
        weights = torch.where(hidden, -torch.inf, scores).softmax(-1)
        mixed.append(torch.bmm(weights, both[:, :, head, nope:]))
    row, own, owned = owners(cu, tokens, requests)
    nobody = q.new_zeros(1, queries, heads, value, dtype=wide)  # for an R of 0
    result = torch.cat([torch.stack(mixed, 2), nobody])[row, own]  # [T, H, v]
    return torch.where(owned[:, None, None], result, 0.0).to(q.dtype)


@mla_attend.fake
def _(q, kv_b, pages, table, seen, cu, scale):
    return q.new_empty(q.shape[0], q.shape[1], widths(q, kv_b, pages)[2])


@mla_attend.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    draw, size, heads, nope, rope, value, latent = Draw(dtype), 4, 3, 8, 4, 6, 16
    cases = (
        ([], []),
        ([0], [3]),
        ([1], [0]),
        ([1, 1], [30, 7]),
        ([5, 0, 1, 20], [3, 2, 40, 0]),
        ([19], [30]),
    )
    for lengths, seen in cases:
        pages = draw.normal(40, size, latent + rope)
        q = draw.normal(sum(lengths), heads, 2 * (nope + rope))[..., : nope + rope]
        kv_b = draw.normal(heads * (nope + value), latent) * latent**-0.5
        yield q, kv_b, pages, *paging(draw, lengths, seen, 40, size), (nope + rope) ** -0.5
