"""Rows of many queries in Triton: keys and values of the context are made once for all of them.

    program (keys, head, long row)   latents of the pages times kv_b --> keys | values, a stretch of them
    program (queries, head)          online softmax over the stretch --> o [T, H, v]

A row is long where that is less work than absorbed. Contexts of any length go through a workspace of one
size, stretch after stretch; what queries have found so far waits in memory. Nothing is waited for: who has
long rows is worked out on the GPU, and stretches are as many as the longest context of the table could need.

What bfloat16 cannot hold of a key, a value or a weight is kept as a second bfloat16 beside it: the meaning
rounds none of them, and products of bfloat16 are exact. T token rows, R requests, H heads, L latent, N pages
of B tokens, r, n and v as in mla.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .jit_triton import blocks, jit, launch, power_of_two, tl
from .tiles_triton import ANYWHERE, tiles

WORKSPACE = 1 << 29  # bytes of keys and values at a time


@jit
def long_row(cu, number, R, LIMIT: tl.constexpr, BR: tl.constexpr):
    """The row that is the ``number``-th of more than LIMIT queries; R where there are fewer."""
    row = tl.arange(0, BR)
    count = tl.load(cu + row + 1, mask=row < R, other=0) - tl.load(cu + row, mask=row < R, other=0)
    is_long = (count > LIMIT).to(tl.int32)
    own = (is_long == 1) & (tl.cumsum(is_long, 0) == number + 1)
    return tl.min(tl.where(own, row, R), 0)


@jit
def query_block(cu, program, R, LIMIT: tl.constexpr, BR: tl.constexpr, BQ: tl.constexpr):
    """(row, its place among the long ones, block of its queries) of a program; row R past the last block."""
    row = tl.arange(0, BR)
    count = tl.load(cu + row + 1, mask=row < R, other=0) - tl.load(cu + row, mask=row < R, other=0)
    is_long = (count > LIMIT).to(tl.int32)
    needed = tl.where(count > LIMIT, (count + BQ - 1) // BQ, 0).to(tl.int32)
    after = tl.cumsum(needed, 0)
    own = (after > program) & (after - needed <= program)
    which = tl.min(tl.where(own, row, R), 0)
    number = tl.sum(tl.where(own, tl.cumsum(is_long, 0) - 1, 0), 0)
    return which, number, tl.sum(tl.where(own, program - after + needed, 0), 0)


@jit
def expand_kernel(
    kv_b, pages, table, seen, cu, both, shared, page_step, page_row, table_row, start,
    R, H, L, W, ROPE, B, S,
    LIMIT: tl.constexpr, SPLIT: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    number, head, cols = tl.program_id(2), tl.program_id(1) % H, tl.program_id(1) // H
    row = long_row(cu, number, R, LIMIT, BR)
    owned = row < R
    context = tl.load(seen + row, mask=owned, other=0)
    context += tl.load(cu + row + 1, mask=owned, other=0) - tl.load(cu + row, mask=owned, other=0)
    place = tl.program_id(0) * BM + tl.arange(0, BM)
    here = (start + place < context) & (place < S)
    if owned & (start + tl.program_id(0) * BM < context):
        key = start + place
        page = tl.load(table + row.to(tl.int64) * table_row + key // B, mask=here, other=0).to(tl.int64)
        held = pages + page * page_step + (key % B) * page_row
        col = cols * BN + tl.arange(0, BN)
        weight = kv_b + (head * W + col).to(tl.int64) * L
        total = tl.zeros((BM, BN), tl.float32)
        for k in range(0, L, BK):
            of = k + tl.arange(0, BK)
            a = tl.load(held[:, None] + of[None, :], mask=here[:, None] & (of < L)[None, :], other=0.0)
            b = tl.load(weight[None, :] + of[:, None], mask=(col < W)[None, :] & (of < L)[:, None], other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
        first = ((number * H + head) * S + place).to(tl.int64)
        keep = here[:, None] & (col < W)[None, :]
        high = total.to(both.dtype.element_ty)
        if SPLIT:
            put = both + first[:, None] * (2 * W) + col[None, :]
            tl.store(put + W, (total - high.to(tl.float32)).to(both.dtype.element_ty), mask=keep)
        else:
            put = both + first[:, None] * W + col[None, :]
        tl.store(put, high, mask=keep)
        if tl.program_id(1) == 0:
            pe = tl.arange(0, BP)
            is_pe = here[:, None] & (pe < ROPE)[None, :]
            own = tl.load(held[:, None] + L + pe[None, :], mask=is_pe, other=0.0)
            put_pe = shared + (number * S + place).to(tl.int64)[:, None] * ROPE + pe[None, :]
            tl.store(put_pe, own, mask=is_pe)


@jit
def meet(
    own, own_pe, top, total, mixed, keys, width, shared, at, stop, limit, scale,
    N, V, ROPE, W, SPLIT: tl.constexpr, MASKED: tl.constexpr,
    BD: tl.constexpr, BV: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Queries that meet keys at .. at + BN of the stretch, those before ``stop``, each up to its limit."""
    key, n, v, pe = at + tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BV), tl.arange(0, BP)
    here = key < stop
    of_key = keys + key.to(tl.int64)[None, :] * width + n[:, None]
    of_value = keys + key.to(tl.int64)[:, None] * width + N + v[None, :]
    of_pe = shared + key.to(tl.int64)[None, :] * ROPE + pe[:, None]
    on_key, on_value = here[None, :] & (n < N)[:, None], here[:, None] & (v < V)[None, :]
    known = tl.load(of_key, mask=on_key, other=0.0)
    known_pe = tl.load(of_pe, mask=here[None, :] & (pe < ROPE)[:, None], other=0.0)
    value = tl.load(of_value, mask=on_value, other=0.0)
    scores = tl.dot(own, known, input_precision="ieee")
    scores = tl.dot(own_pe, known_pe, scores, input_precision="ieee")
    if SPLIT:
        scores = tl.dot(own, tl.load(of_key + W, mask=on_key, other=0.0), scores)
    scores *= scale
    if MASKED:
        scores = tl.where(here[None, :] & (key[None, :] < limit[:, None]), scores, float("-inf"))
    peak = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(peak == float("-inf"), 0.0, peak) if MASKED else peak
    fade, weights = tl.exp2(top - base), tl.exp2(scores - base[:, None])
    total = total * fade + tl.sum(weights, 1)
    mixed *= fade[:, None]
    high = weights.to(value.dtype)
    mixed = tl.dot(high, value, mixed, input_precision="ieee")
    if SPLIT:
        rest = tl.load(of_value + W, mask=on_value, other=0.0)
        mixed = tl.dot(high, rest, mixed)
        mixed = tl.dot((weights - high.to(tl.float32)).to(value.dtype), value, mixed)
    return peak, total, mixed


@jit
def rows_kernel(
    q, both, shared, seen, cu, found, sums, out, q_row, q_head, start,
    R, H, N, V, ROPE, S, scale,
    LIMIT: tl.constexpr, SPLIT: tl.constexpr, ALONE: tl.constexpr, BR: tl.constexpr,
    BD: tl.constexpr, BV: tl.constexpr, BP: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    row, number, block = query_block(cu, tl.program_id(0), R, LIMIT, BR, BQ)
    head, owned = tl.program_id(1), row < R
    begin, end = tl.load(cu + row, mask=owned, other=0), tl.load(cu + row + 1, mask=owned, other=0)
    before = tl.load(seen + row, mask=owned, other=0) + block * BQ - start  # keys of this stretch all see
    token, v = begin + block * BQ + tl.arange(0, BQ), tl.arange(0, BV)
    live = owned & (token < end)
    stop = tl.where(owned, tl.minimum(before + tl.minimum(BQ, end - begin - block * BQ), S), 0).to(tl.int32)
    at = (token * H + head).to(tl.int64)
    keep = live[:, None] & (v < V)[None, :]
    if (stop > 0) & owned:
        W, n, pe = N + V, tl.arange(0, BD), tl.arange(0, BP)
        of = q + token.to(tl.int64)[:, None] * q_row + head * q_head
        own = tl.load(of + n[None, :], mask=live[:, None] & (n < N)[None, :], other=0.0)
        own_pe = tl.load(of + N + pe[None, :], mask=live[:, None] & (pe < ROPE)[None, :], other=0.0)
        top = tl.full((BQ,), float("-inf"), tl.float32)
        total, mixed = tl.zeros((BQ,), tl.float32), tl.zeros((BQ, BV), tl.float32)
        if not ALONE:
            met = live & (start > 0)
            top = tl.load(sums + at * 2, mask=met, other=float("-inf"))
            total = tl.load(sums + at * 2 + 1, mask=met, other=0.0)
            mixed = tl.load(found + at[:, None] * V + v[None, :], mask=keep & (start > 0), other=0.0)
        width = W * 2 if SPLIT else W
        first = (number * H + head).to(tl.int64) * S
        keys, of_pe = both + first * width, shared + number.to(tl.int64) * S * ROPE
        limit = (before + 1 + tl.arange(0, BQ)).to(tl.int32)
        full = tl.minimum(tl.maximum(before + 1, 0), stop).to(tl.int32) // BN * BN
        for k in range(0, full, BN):
            top, total, mixed = meet(
                own, own_pe, top, total, mixed, keys, width, of_pe, k, stop, limit, scale,
                N, V, ROPE, W, SPLIT, False, BD, BV, BP, BN,
            )  # fmt: skip
        for k in range(full, stop, BN):
            top, total, mixed = meet(
                own, own_pe, top, total, mixed, keys, width, of_pe, k, stop, limit, scale,
                N, V, ROPE, W, SPLIT, True, BD, BV, BP, BN,
            )  # fmt: skip
        if not ALONE:
            tl.store(sums + at * 2, top, mask=live)
            tl.store(sums + at * 2 + 1, total, mask=live)
            tl.store(found + at[:, None] * V + v[None, :], mixed, mask=keep)
        result = mixed / total[:, None]  # of a later stretch again, if queries see any of it
        tl.store(out + at[:, None] * V + v[None, :], result.to(out.dtype.element_ty), mask=keep)


class Long(NamedTuple):
    """What is known of the long rows of a step before it is looked at."""

    limit: int  # queries of a row up to which it is not long
    rows: int  # at most


def long_rows(tokens: int, requests: int, limit: int) -> Long:
    """T token rows of R requests hold at most so many."""
    return Long(limit, min(requests, tokens // (limit + 1)))


def attend_long(
    q: Tensor, kv_b: Tensor, pages: Tensor, table: Tensor, seen: Tensor, cu: Tensor, scale: float,
    out: Tensor, many: Long,
) -> None:  # fmt: skip
    """Write the long rows of out [T, H, v]; arguments as of mla_attend."""
    (tokens, heads, width), latent, requests = q.shape, kv_b.shape[1], table.shape[0]
    rope, value, each = pages.shape[2] - latent, out.shape[2], kv_b.shape[0] // heads
    nope, split = width - rope, q.dtype == torch.bfloat16
    expand, attend = (tiles(name) if split else ANYWHERE[name] for name in ("mla_expand", "mla_rows"))
    longest, held = table.shape[1] * pages.shape[1], each * (4 if split else q.element_size())
    stretch = max(1, WORKSPACE // (many.rows * heads * held * 128)) * 128
    stretch = min(stretch, blocks(longest, 128) * 128)
    alone = longest <= stretch
    both = q.new_empty(many.rows, heads, stretch, each * (2 if split else 1))
    shared = q.new_empty(many.rows, stretch, rope)
    kept = (0, 0) if alone else (tokens, heads)
    found = torch.empty(*kept, value, dtype=torch.float32, device=q.device)
    sums = torch.empty(*kept, 2, dtype=torch.float32, device=q.device)
    fixed = {"LIMIT": many.limit, "SPLIT": split, "BR": power_of_two(requests)}
    wide = {"BD": max(16, power_of_two(nope)), "BV": max(16, power_of_two(value))}
    at, rotary = attend.constants, max(16, power_of_two(rope))
    programs = tokens // at["BQ"] + many.rows
    for start in range(0, longest, stretch):
        grid = (
            blocks(stretch, expand.constants["BM"]),
            heads * blocks(each, expand.constants["BN"]),
            many.rows,
        )
        launch(
            expand_kernel, grid, kv_b, pages, table, seen, cu, both, shared, *pages.stride()[:2],
            table.stride(0), start, requests, heads, latent, each, rope, pages.shape[1], stretch,
            **fixed, BP=rotary, **expand.constants, num_warps=expand.warps, num_stages=expand.stages,
        )  # fmt: skip
        launch(
            rows_kernel, (programs, heads), q, both, shared, seen, cu, found, sums, out, *q.stride()[:2],
            start, requests, heads, nope, value, rope, stretch,
            scale * 1.4426950408889634, **fixed, ALONE=alone, BP=rotary, **wide, **at,
            num_warps=attend.warps, num_stages=attend.stages,
        )  # fmt: skip
