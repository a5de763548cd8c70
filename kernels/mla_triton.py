"""Latent attention over pages in Triton: kv_b taken into the query, the context split among programs.

    q [T, H, n+r] --kv_b's keys, by torch--> [H, T, L]
    program (token, split):   its part of the row's context, once for all heads -> mean [H, L], log of the sum
    program (token, head):    the parts merged -> z [H, T, L]  --kv_b's values, by torch--> o [T, H, v]

The meaning rounds none of the three it puts in between. So in bfloat16 the query, the weights of the context
and z are each two bfloat16, high and low: what the first cannot hold is the second.
Where rows have several tokens a program takes two of one row together, and the context is read half as often.
Rows of so many queries that to expand their context is less work go through mla_prefill_triton.py.
T token rows, R requests, H heads, L latent, N pages of B tokens, r, n and v as in mla.py.
"""

import torch
from torch import Tensor

from .conv_triton import owner_of
from .jit_triton import (
    blocks,
    first_objection,
    jit,
    launch,
    no_gpu,
    not_rows,
    on_amd,
    power_of_two,
    tl,
    wrong_dtype,
)
from .mla import absorbed_limit, mla_attend, widths
from .mla_prefill_triton import attend_long, long_rows

KEYS = 32  # of the context that meet the queries together
FOLD = 2  # tokens of a row that meet the context together, where rows have several; four spill
MOST_SPLITS = 16
FEW_TOKENS = 512  # below which the context is split, to fill a GPU


@jit
def attend_kernel(
    query, low, q, pages, table, seen, cu, mean, lse,
    query_head, query_row, q_row, q_head, page_step, page_row, table_row,
    T, R, H, N, L, ROPE, B, scale,
    SPLITS: tl.constexpr, STEPS: tl.constexpr, LIMIT: tl.constexpr, SPLIT: tl.constexpr, F: tl.constexpr,
    HP: tl.constexpr, BL: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    first, split = tl.program_id(0), tl.program_id(1)
    near = first + tl.arange(0, F)
    row = tl.sum(tl.where(near == first, owner_of(near, cu, R, STEPS), 0), 0)
    owned = row < R
    begin, end = tl.load(cu + row, mask=owned, other=0), tl.load(cu + row + 1, mask=owned, other=0)
    before, place = tl.load(seen + row, mask=owned, other=0), first - begin
    leads = owned & (place % F == 0) & ((LIMIT == 0) | (end - begin <= LIMIT))
    context = tl.where(leads, before + tl.minimum(place + F, end - begin), 0).to(tl.int32)
    part = tl.cdiv(tl.cdiv(context, SPLITS), BN) * BN
    start = tl.minimum(split * part, context)
    stop = tl.minimum(start + part, context)

    m, col, pe, n = tl.arange(0, F * HP), tl.arange(0, BL), tl.arange(0, BR), tl.arange(0, BN)
    token, head = (first + m // HP).to(tl.int64), m % HP
    live = (head < H) & leads & (token < end)
    limit = before + place + m // HP + 1
    asked = head[:, None] * query_head + token[:, None] * query_row + col[None, :]
    own = tl.load(query + asked, mask=live[:, None] & (col < L)[None, :], other=0.0)
    at = q + token[:, None] * q_row + head[:, None] * q_head + N
    own_pe = tl.load(at + pe[None, :], mask=live[:, None] & (pe < ROPE)[None, :], other=0.0)
    top = tl.full((F * HP,), float("-inf"), tl.float32)
    total, mixed = tl.zeros((F * HP,), tl.float32), tl.zeros((F * HP, BL), tl.float32)
    for at_key in range(start, stop, BN):
        key = at_key + n
        here = key < stop
        page = tl.load(table + row.to(tl.int64) * table_row + key // B, mask=here, other=0).to(tl.int64)
        held = pages + page[:, None] * page_step + (key % B)[:, None] * page_row
        known = tl.load(held + col[None, :], mask=here[:, None] & (col < L)[None, :], other=0.0)
        known_pe = tl.load(held + L + pe[None, :], mask=here[:, None] & (pe < ROPE)[None, :], other=0.0)
        scores = tl.dot(own, tl.trans(known), input_precision="ieee")
        scores = tl.dot(own_pe, tl.trans(known_pe), scores, input_precision="ieee")
        if SPLIT:
            rest = tl.load(low + asked, mask=live[:, None] & (col < L)[None, :], other=0.0)
            scores = tl.dot(rest, tl.trans(known), scores)
        scores *= scale
        scores = tl.where(here[None, :] & (key[None, :] < limit[:, None]), scores, float("-inf"))
        peak = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(peak == float("-inf"), 0.0, peak)
        fade, weights = tl.exp(top - base), tl.exp(scores - base[:, None])
        total = total * fade + tl.sum(weights, 1)
        high = weights.to(known.dtype)
        mixed = tl.dot(high, known, mixed * fade[:, None], input_precision="ieee")
        if SPLIT:
            mixed = tl.dot((weights - high.to(tl.float32)).to(known.dtype), known, mixed)
        top = peak
    some = total > 0.0
    put = (split * T + token) * H + head
    tl.store(lse + put, tl.where(some, top + tl.log(tl.where(some, total, 1.0)), float("-inf")), mask=live)
    result = mixed / tl.where(some, total, 1.0)[:, None]
    tl.store(mean + put[:, None] * L + col[None, :], result, mask=live[:, None] & (col < L)[None, :])


@jit
def merge_kernel(
    mean, lse, cu, z, low, T, R, H, L,
    SPLITS: tl.constexpr, STEPS: tl.constexpr, LIMIT: tl.constexpr, SPLIT: tl.constexpr,
    BS: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, col = tl.arange(0, BS), tl.arange(0, BL)
    owned = token < tl.load(cu + R)
    if LIMIT > 0:  # a long row has no parts
        row = owner_of(token, cu, R, STEPS)
        count = tl.load(cu + row + 1, mask=owned, other=0) - tl.load(cu + row, mask=owned, other=0)
        owned &= count <= LIMIT
    sums = tl.load(lse + (split * T + token) * H + head, mask=owned & (split < SPLITS), other=float("-inf"))
    top = tl.max(sums, 0)
    total = tl.sum(tl.exp(sums - tl.where(owned, top, 0.0)), 0)
    merged = tl.zeros((BL,), tl.float32)
    for i in tl.static_range(SPLITS):
        at = (i * T + token) * H + head
        own = tl.load(lse + at, mask=owned, other=0.0)
        share = tl.where(owned, tl.exp(own - top) / total, 0.0)
        found = tl.load(mean + at * L + col, mask=(col < L) & owned, other=0.0)
        merged += share * found
    put, high = (head * T + token) * L + col, merged.to(z.dtype.element_ty)
    tl.store(z + put, high, mask=col < L)
    if SPLIT:
        tl.store(low + put, (merged - high.to(tl.float32)).to(z.dtype.element_ty), mask=col < L)


def objection(
    q: Tensor, kv_b: Tensor, pages: Tensor, table: Tensor, seen: Tensor, cu: Tensor, scale: float
) -> str | None:
    """Why these arguments are not for here, or None."""
    same = q.dtype == kv_b.dtype == pages.dtype
    return no_gpu(q, kv_b, pages, table, seen, cu) or first_objection(
        wrong_dtype(q, kv_b, pages),
        None if same else f"queries of {q.dtype}, kv_b of {kv_b.dtype}, pages of {pages.dtype}",
        not_rows(q=q, pages=pages),
        None if kv_b.is_contiguous() else "kv_b is not in one piece",
        None if table.stride(1) == 1 else "the pages of a request are not side by side",
    )


@mla_attend.impl("triton", objection=objection, note="absorbed, or expanded for rows of many queries")
def mla_attend_triton(
    q: Tensor, kv_b: Tensor, pages: Tensor, table: Tensor, seen: Tensor, cu: Tensor, scale: float
) -> Tensor:
    """As the meaning. How often a context is split depends on the token rows of the call, and with it the
    last bits of the result.
    """
    (tokens, heads), requests, (nope, rope, value) = q.shape[:2], table.shape[0], widths(q, kv_b, pages)
    latent, kv = kv_b.shape[1], kv_b.view(heads, nope + value, kv_b.shape[1])
    many = long_rows(tokens, requests, absorbed_limit(latent, nope + value))
    rows = {"STEPS": requests.bit_length(), "LIMIT": many.limit if many.rows else 0}
    rows["SPLIT"] = split = q.dtype != torch.float32
    asked = q[..., :nope].transpose(0, 1)
    query = torch.bmm(asked, kv[:, :nope])  # [H, T, L]
    low = torch.baddbmm(query, asked, kv[:, :nope], beta=-1) if split else query  # summed in float32
    longest = table.shape[1] * pages.shape[1]
    splits = max(1, min(MOST_SPLITS, blocks(longest, 4 * KEYS), FEW_TOKENS // max(1, tokens)))
    fold = 1 if tokens <= requests else FOLD
    keys = KEYS // 2 if fold > 1 and on_amd() else KEYS  # 32 spill there
    mean = torch.empty(splits, tokens, heads, latent, dtype=torch.float32, device=q.device)
    lse = torch.empty(splits, tokens, heads, dtype=torch.float32, device=q.device)
    wide = power_of_two(latent)
    launch(
        attend_kernel, (tokens, splits), query, low, q, pages, table, seen, cu, mean, lse,
        *query.stride()[:2], *q.stride()[:2], *pages.stride()[:2], table.stride(0),
        tokens, requests, heads, nope, latent, rope, pages.shape[1], scale,
        SPLITS=splits, **rows, F=fold, HP=max(16, power_of_two(heads)),
        BL=max(16, wide), BR=max(16, power_of_two(rope)), BN=keys,
        num_warps=4 if fold == 1 or on_amd() else 8, num_stages=2,
    )  # fmt: skip
    z, low = torch.empty_like(query), torch.empty_like(query) if split else query
    launch(
        merge_kernel, (tokens, heads), mean, lse, cu, z, low, tokens, requests, heads, latent,
        SPLITS=splits, **rows, BS=power_of_two(splits), BL=wide, num_warps=2,
    )  # fmt: skip
    values = kv[:, -value:].mT
    out = torch.baddbmm(torch.bmm(low, values), z, values) if split else torch.bmm(z, values)
    out = out.transpose(0, 1).contiguous()
    if many.rows:
        attend_long(q, kv_b, pages, table, seen, cu, scale, out, many)
    return out
