"""Attention of rows of many queries where a token's latents lie on one rank of several: the context comes.

    its own tokens     here already, on every rank: each makes the latents of all rows
    the context        each rank's rows of a stretch, all_gather, put in order; then the next stretch

    bytes a rank gets  context * (L+r), whatever the queries       (queries that go to the context instead:
                                                                    queries * heads of all ranks * (2L+r))
Keys and values are expanded for this rank's heads; what the stretches give is merged as it comes, so memory
does not grow with the context. T token rows, R requests, H heads of this rank, L latent, N pages of b rows
here; n and r key widths without and with position, v value width.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .context_place import context_place, local_length
from .mla import BLOCK_ELEMENTS, QUERY_BLOCK, Row, expand, fetch, paging, widths
from .op import LIBRARY, NAMESPACE, acc, op, unseen_by_dynamo
from .samples import Draw

STRETCH = 4096  # tokens of a context that are gathered at a time
START = 1 << 20  # bytes that could be sent while one more collective starts


def exchanged_rows(seen: Tensor, cu: Tensor, query: int, token: int) -> Tensor:
    """How many token rows had better send their queries; the context had better come to those after them.

    seen [R], cu [R+1]; query, token: bytes that a query, a token of context costs -> int64 on the CPU, one of
    cu, so that the bytes of all rows are the fewest. All ranks have the same rows, so all answer alike.
    """
    bounds, before = cu.tolist(), seen.tolist()
    by_query = [(b - a) * query for a, b in pairwise(bounds)]
    by_context = [s * token + -(-s // STRETCH) * START if s else 0 for s in before]
    sent, come = list(accumulate(by_query, initial=0)), list(accumulate(by_context, initial=0))
    costs = [a + come[-1] - b for a, b in zip(sent, come)]
    return torch.tensor(bounds[min(range(len(costs)), key=lambda row: (costs[row], -row))])


# Not an Op: a choice of costs, with no meaning that another way to compute it would have to equal.
LIBRARY.define(
    "exchanged_rows(Tensor seen, Tensor cu, int query, int token) -> Tensor",
    tags=[torch.Tag.pt2_compliant_tag],
)
LIBRARY.impl("exchanged_rows", unseen_by_dynamo(exchanged_rows), "CompositeExplicitAutograd")
torch.library.register_fake(
    f"{NAMESPACE}::exchanged_rows", lambda *_: torch.empty((), dtype=torch.int64), lib=LIBRARY
)


@op(opaque=True)
def mla_attend_gathered(
    q: Tensor,
    kv_b: Tensor,
    done: Tensor,
    pages: Tensor,
    table: Tensor,
    seen: Tensor,
    cu: Tensor,
    own: Tensor,
    group: str,
    interleave: int,
) -> Tensor:
    """Causal attention of the token rows that are not ``done``, each to its request's context and own rows.

    q [T, H, n+r], kv_b [H*(n+v), L], done [H, t, v] values of the first t token rows, pages [N, b, L+r],
    table [R, P], seen [R], cu [R+1] of which t is one, own [T, L+r] latents of all token rows -> o [T, H, v]
    like q. Scores are scaled by (n+r)^-0.5. group: that of the ranks which share the context, "" for one
    rank. Token rows past cu[-1] are not read and come back zero.
    """
    heads, (nope, _, value) = q.shape[1], widths(q, kv_b, pages)
    kv = kv_b.to(acc(q.dtype)).view(heads, nope + value, kv_b.shape[1])
    place = context_place(group, interleave) if group else torch.tensor([0, 1, interleave])
    bounds, before, first = cu.tolist(), seen.tolist(), done.shape[1]
    out = q.new_empty(q.shape[0], heads, value)
    out[:first] = done.transpose(0, 1)
    out[max(bounds[-1], first) :] = 0.0
    for number, (begin, end) in enumerate(pairwise(bounds)):
        if first <= begin < end:
            row, tokens = Row(number, begin, end - begin, before[number]), slice(begin, end)
            asked = q[tokens].to(kv.dtype).transpose(0, 1) * q.shape[2] ** -0.5  # [H, c, n+r]
            met = nothing_met(asked, value)
            known = own[tokens].to(pages.dtype).to(kv.dtype)  # as the pages hold them
            for start in range(0, row.count, STRETCH):
                meet(met, asked, known[start : start + STRETCH], kv, start)
            for stretch in stretches(pages, table, row, place, group):
                meet(met, asked, stretch.to(kv.dtype), kv, None)
            out[tokens] = (met.mixed / met.total).transpose(0, 1)
    return out


class Met(NamedTuple):
    """What queries have found so far; changed as they meet more."""

    top: Tensor  # [H, c, 1] the highest score
    total: Tensor  # [H, c, 1] sum of exponentials, relative to it
    mixed: Tensor  # [H, c, v] their weighted values


def nothing_met(asked: Tensor, value: int) -> Met:
    """Of queries asked [H, c, n+r]."""
    top = asked.new_full((*asked.shape[:2], 1), -torch.inf)
    return Met(top, torch.zeros_like(top), asked.new_zeros(*asked.shape[:2], value))


def meet(met: Met, asked: Tensor, known: Tensor, kv: Tensor, start: int | None) -> None:
    """Let queries asked [H, c, n+r] meet latents known [k, L+r] as well.

    start: the latents are those of the queries from there on, and a query sees none after its own; None: all
    queries see all of them.
    """
    heads, latent, width = kv.shape[0], kv.shape[2], known.shape[1]
    keys, values = expand(known, kv, asked.shape[2] - (width - latent))
    step = max(QUERY_BLOCK, BLOCK_ELEMENTS // (heads * len(known)))
    behind = torch.arange(len(known), device=known.device)
    for begin in range(start or 0, asked.shape[1], step):
        some = slice(begin, begin + step)
        scores = torch.bmm(asked[:, some], keys.mT)  # [H, s, k]
        if start is not None:
            query = torch.arange(begin, begin + scores.shape[1], device=known.device) - start
            scores.masked_fill_(behind > query.unsqueeze(1), -torch.inf)
        top, total, mixed = (part[:, some] for part in met)
        peak = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, fade = scores.sub_(peak).exp_(), (top - peak).exp_()
        total.mul_(fade).add_(weights.sum(-1, keepdim=True))
        mixed.mul_(fade).baddbmm_(weights, values)
        top.copy_(peak)


def stretches(pages: Tensor, table: Tensor, row: Row, place: Tensor, group: str) -> Iterator[Tensor]:
    """The latents [k, L+r] of the tokens before a row, in order, from all ranks: a collective for each."""
    _, ranks, together = place.tolist()
    turn, last = ranks * together, max(int(local_length(torch.tensor(row.seen), place)) - 1, 0)
    step = max(1, STRETCH // turn) * turn
    for first in range(0, row.seen, step):
        count = min(step, row.seen - first)
        here = torch.arange(-(-count // turn) * together, device=pages.device) + first // ranks
        rows = fetch(pages, table, [row.request], here.clamp(max=last).unsqueeze(0))[0]
        if group:
            ops = torch.ops._c10d_functional
            rows = ops.wait_tensor(ops.all_gather_into_tensor(rows.contiguous(), ranks, group))
        in_order = rows.unflatten(0, (ranks, -1, together)).transpose(0, 1).flatten(0, 2)
        yield in_order[:count]  # what a rank does not have is past the count


@mla_attend_gathered.fake
def _(q, kv_b, done, pages, table, seen, cu, own, group, interleave):
    return q.new_empty(q.shape[0], q.shape[1], done.shape[2])


@mla_attend_gathered.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    draw, size, heads, nope, rope, value, latent = Draw(dtype), 4, 3, 8, 4, 6, 16
    for lengths, seen, first in (
        ([], [], 0),
        ([0], [3], 0),
        ([1], [0], 1),
        ([5, 0, 1, 20], [3, 2, 40, 0], 0),
        ([1, 5, 9], [30, 7, 11], 1),
    ):
        pages = draw.normal(40, size, latent + rope)
        q = draw.normal(sum(lengths), heads, 2 * (nope + rope))[..., : nope + rope]
        kv_b = draw.normal(heads * (nope + value), latent) * latent**-0.5
        done, own = draw.normal(heads, first, value), draw.normal(sum(lengths), latent + rope)
        yield q, kv_b, done, pages, *paging(draw, lengths, seen, 40, size), own, "", 2
