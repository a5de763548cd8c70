"""The router in Triton: logits in tiles of one size whatever the batch, then a program a token that chooses.

    x [T, D] gate [E, D]  --tiles, D in eight parts-->  partial [8, T, E]
    their sum, in order  -->  sigmoid + bias  -->  k times the largest key: the value first, then the lower id
    the k logits, with what their sum lost  -->  sigmoid in float64  -->  weights

Every row goes through the same products in the same order, so it chooses alike in any batch, and experts with
equal weights tie. T token rows, D width, E experts, k chosen.
"""

import torch
from torch import Tensor

from .jit_triton import blocks, first_objection, jit, launch, no_gpu, not_rows, power_of_two, tl, wrong_dtype
from .moe import route

PARTS = 8  # of the width, summed apart so that a few tokens fill a GPU
TILE = {"BM": 64, "BN": 32, "BK": 128}
MOST_EXPERTS = 4096  # whose scores fit the registers of a program


@jit
def both_of(a, b):
    """(a + b rounded, what rounding dropped)."""
    total = a + b
    own = total - a
    lost = (a - (total - own)) + (b - own)
    return total, tl.where(tl.abs(total) < float("inf"), lost, 0.0)


@jit
def router_logits_kernel(
    x, gate, partial, x_row, gate_row, T, E, D, part,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BM + tl.arange(0, BM)
    expert = tl.program_id(1) * BN + tl.arange(0, BN)
    first = tl.program_id(2) * part
    at_x = x + token.to(tl.int64)[:, None] * x_row
    at_gate = gate + expert.to(tl.int64)[None, :] * gate_row
    total, lost = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    for k in range(first, first + part, BK):
        col = k + tl.arange(0, BK)
        inside = col < D
        a = tl.load(at_x + col[None, :], mask=(token < T)[:, None] & inside[None, :], other=0.0)
        b = tl.load(at_gate + col[:, None], mask=(expert < E)[None, :] & inside[:, None], other=0.0)
        total, rest = both_of(total, tl.dot(a, b, input_precision="ieee"))
        lost += rest
    at = (tl.program_id(2).to(tl.int64) * T + token[:, None]) * E + expert[None, :]
    tl.store(partial + at, total + lost, mask=(token < T)[:, None] & (expert < E)[None, :])


@jit
def ordered(x):
    """A float32 as an int32 with the same order; NaN above all, and the two zeros alike."""
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x != x, 0x7FFFFFFF, bits)


@jit
def choose_kernel(
    partial, bias, weights, ids, T, E, scale,
    PARTS: tl.constexpr, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    token, expert, place = tl.program_id(0).to(tl.int64), tl.arange(0, BE), tl.arange(0, BT)
    live = expert < E
    logits, lost = tl.zeros((BE,), tl.float32), tl.zeros((BE,), tl.float32)
    for i in tl.static_range(PARTS):
        part = tl.load(partial + (i * T + token) * E + expert, mask=live, other=0.0)
        logits, rest = both_of(logits, part)
        lost += rest
    score = tl.sigmoid(logits + lost)
    choice = score + tl.load(bias + expert, mask=live, other=0.0)
    key = (ordered(choice).to(tl.int64) << 32) | (0x7FFFFFFF - expert).to(tl.int64)
    least = -0x7FFFFFFFFFFFFFFF
    key = tl.where(live, key, least)
    chosen, wanted = tl.zeros((BT,), tl.int64), place < TOP_K
    high, low = tl.zeros((BT,), tl.float32), tl.zeros((BT,), tl.float32)
    for j in tl.static_range(TOP_K):
        best = tl.max(key, 0)
        pick = 0x7FFFFFFF - (best & 0x7FFFFFFF)
        own, rest = tl.where(expert == pick, logits, 0.0), tl.where(expert == pick, lost, 0.0)
        chosen = tl.where(place == j, pick, chosen)
        high = tl.where(place == j, tl.sum(own, 0), high)
        low = tl.where(place == j, tl.sum(rest, 0), low)
        key = tl.where(expert == pick, least, key)
    # only k of them in float64, which is slow on some GPUs; a float32 sigmoid is rounded three times
    exact = high.to(tl.float64) + low.to(tl.float64)
    weight = tl.where(wanted, 1.0 / (1.0 + tl.exp(-exact)), 0.0)
    if RENORMALIZE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    tl.store(ids + token * TOP_K + place, chosen, mask=wanted)
    tl.store(weights + token * TOP_K + place, (weight * scale).to(tl.float32), mask=wanted)


def objection(
    x: Tensor, gate_w: Tensor, bias: Tensor, top_k: int, scale: float, renormalize: bool
) -> str | None:
    """Why these arguments are not for here, or None."""
    experts = gate_w.shape[0]
    return no_gpu(x, gate_w, bias) or first_objection(
        wrong_dtype(x, gate_w),
        wrong_dtype(bias, allowed=(torch.float32,)),
        None if x.dtype == gate_w.dtype else f"rows of {x.dtype} and weights of {gate_w.dtype}",
        not_rows(x=x, gate_w=gate_w),
        f"{experts} experts, at most {MOST_EXPERTS} fit" if experts > MOST_EXPERTS else None,
    )


@route.impl("triton", objection=objection, note="logits of float32 products")
def route_triton(
    x: Tensor, gate_w: Tensor, bias: Tensor, top_k: int, scale: float, renormalize: bool
) -> tuple[Tensor, Tensor]:
    """As the meaning, with products summed in float32 over a block of the width: experts whose scores are
    nearer than its rounding may change places.
    """
    (tokens, width), experts = x.shape, gate_w.shape[0]
    partial = torch.empty(PARTS, tokens, experts, dtype=torch.float32, device=x.device)
    part = blocks(width, PARTS * TILE["BK"]) * TILE["BK"]
    grid = (blocks(tokens, TILE["BM"]), blocks(experts, TILE["BN"]), PARTS)
    args = (x, gate_w, partial, x.stride(0), gate_w.stride(0), tokens, experts, width, part)
    launch(router_logits_kernel, grid, *args, **TILE, num_stages=3)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=x.device)
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=x.device)
    launch(
        choose_kernel, (tokens,), partial, bias, weights, ids, tokens, experts, scale,
        PARTS=PARTS, TOP_K=top_k, RENORMALIZE=renormalize, BE=power_of_two(experts), BT=power_of_two(top_k),
    )  # fmt: skip
    return weights, ids
