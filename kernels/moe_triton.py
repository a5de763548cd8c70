"""MXFP4 experts in Triton: rows sorted by expert, then two grouped products straight from the packed weights.

    a block of rows z [M, L] of one expert       w1, w3 [N, L] packed
      w1 z^T, w3 z^T --> situ --> inner [M, N]   weights are the left operand: they stay in registers, and
      w2 inner^T ------> rows [M, L]             sixteen rows are enough for the widest matrix instruction

    form        weights            rows       for
    registers   to bfloat16 here   bfloat16   Hopper, and what is not known
    scaled      tl.dot_scaled      bfloat16   Blackwell, MI350
    mxfp8       tl.dot_scaled      e4m3       block-scaled matrix instructions (moe_mxfp8_triton.py)
    float32     to float32 here    float32    models in float32

A weight is exact in bfloat16, so rows meet the very numbers the meaning multiplies by.
T token rows, L latent, E experts, I inner, k chosen experts a token.
"""

import torch
from torch import Tensor

from .jit_triton import blocks, first_objection, jit, launch, no_gpu, not_rows, tl, wrong_dtype
from .moe import experts_unfinalized
from .moe_sort_triton import sorted_by_expert
from .situ_triton import situ_of
from .tiles_triton import block_scaled, expert_tiles

UNIT = 2.0**64  # what sums of the form "registers" are multiplied by in the end


@jit
def to_float32(p, s, BN: tl.constexpr, BK: tl.constexpr):
    """p [BN, BK / 2], s [BN, BK / 32] -> float32 [BN, BK]. A code's bits, where a float32 has them, are it
    over 2^126.
    """
    p = p.to(tl.int32)
    code = tl.join(p & 15, p >> 4).reshape(BN, BK)
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    value = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
    scale = s.to(tl.int32) << 23
    scale = tl.where(scale == 0, 0x00400000, scale).to(tl.float32, bitcast=True)
    return (value.reshape(BN, BK // 32, 32) * scale[:, :, None]).reshape(BN, BK)


@jit
def to_bfloat16(p, s, BN: tl.constexpr, BK: tl.constexpr):
    """The same / 2^64 in bfloat16, two values a word: with the 2^-126 of the bits, scales up to 2^64 are one
    factor that bfloat16 has. Weights below 2^-62 lose bits.
    """
    b = p.to(tl.uint32)
    pair = ((b * 0x00040040) & 0x01C001C0) | ((b * 0x01001000) & 0x80008000)
    bits = tl.join((pair & 0xFFFF).to(tl.uint16), (pair >> 16).to(tl.uint16)).reshape(BN, BK)
    exponent = tl.minimum(tl.maximum(s.to(tl.int32) + 62, 0), 255)
    scale = (exponent << 7).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    value = bits.to(tl.bfloat16, bitcast=True).reshape(BN, BK // 32, 32)
    return (value * scale[:, :, None]).reshape(BN, BK)


@jit
def weights_of(w, s, e, row, rows, col, K, WHOLE: tl.constexpr, BK: tl.constexpr):
    """Columns col .. col + BK of some rows of expert e, codes and scales; past the last one they are zero."""
    at = e * rows + row.to(tl.int64)[:, None]
    byte, group = col // 2 + tl.arange(0, BK // 2), col // 32 + tl.arange(0, BK // 32)
    codes, scales = w + at * (K // 2) + byte[None, :], s + at * (K // 32) + group[None, :]
    if WHOLE:
        p, scale = tl.load(codes), tl.load(scales)
    else:
        p = tl.load(codes, mask=(byte < K // 2)[None, :], other=0)
        scale = tl.load(scales, mask=(group < K // 32)[None, :], other=0)
    return p, scale


@jit
def times(p, s, a, a_scale, total, FORM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """total [BN, BM] + packed weights [BN, BK] times a [BK, BM]; a_scale [BM, BK / 32] of the form mxfp8."""
    if FORM == "registers":
        total = tl.dot(to_bfloat16(p, s, BN, BK), a, total)
    elif FORM == "scaled":
        total = tl.dot_scaled(p, s, "e2m1", a, None, "bf16", total, fast_math=True)
    elif FORM == "mxfp8":
        total = tl.dot_scaled(p, s, "e2m1", a, a_scale, "e4m3", total, fast_math=True)
    else:
        total = tl.dot(to_float32(p, s, BN, BK), a, total, input_precision="ieee")
    return total


@jit
def rows_of(a, row, live, col, K, a_row, WHOLE: tl.constexpr, BK: tl.constexpr):
    """Columns col .. col + BK of some rows, upright [BK, BM]."""
    k = col + tl.arange(0, BK)
    here = live[None, :] if WHOLE else live[None, :] & (k < K)[:, None]
    return tl.load(a + row[None, :] * a_row + k[:, None], mask=here, other=0.0)


@jit
def scales_of(a_scale, row, live, col, K, WHOLE: tl.constexpr, FORM: tl.constexpr, BK: tl.constexpr):
    """Their scales [BM, BK / 32], of the form mxfp8."""
    if FORM == "mxfp8":
        group = col // 32 + tl.arange(0, BK // 32)
        here = live[:, None] if WHOLE else live[:, None] & (group < K // 32)[None, :]
        scale = tl.load(a_scale + row[:, None] * (K // 32) + group[None, :], mask=here, other=0)
    else:
        scale = None
    return scale


@jit
def gate_up_kernel(
    z, z_scale, order, w1, s1, w3, s3, expert, first, end, inner, inner_scale,
    z_row, I, L, beta, linear_beta,
    TOP_K: tl.constexpr, CAPPED: tl.constexpr, FORM: tl.constexpr, WHOLE: tl.constexpr, UNIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    e = tl.load(expert + block).to(tl.int64)
    if e >= 0:
        place = tl.load(first + block) + tl.arange(0, BM)
        live = place < tl.load(end + block)
        token = (tl.load(order + place, mask=live, other=0) // TOP_K).to(tl.int64)
        out = tl.program_id(0) * BN + tl.arange(0, BN)
        row = tl.minimum(out, I - 1)
        gate, up = tl.zeros((BN, BM), tl.float32), tl.zeros((BN, BM), tl.float32)
        for col in range(0, L, BK):
            a = rows_of(z, token, live, col, L, z_row, WHOLE, BK)
            a_scale = scales_of(z_scale, token, live, col, L, WHOLE, FORM, BK)
            p, s = weights_of(w1, s1, e, row, I, col, L, WHOLE, BK)
            gate = times(p, s, a, a_scale, gate, FORM, BN, BK)
            p, s = weights_of(w3, s3, e, row, I, col, L, WHOLE, BK)
            up = times(p, s, a, a_scale, up, FORM, BN, BK)
        made = tl.trans(situ_of(gate * UNIT, up * UNIT, beta, linear_beta, CAPPED))  # [BM, BN]
        at = place.to(tl.int64)[:, None]
        keep = live[:, None] & (out < I)[None, :]
        if FORM == "mxfp8":
            made, scale = quantised(made.reshape(BM, BN // 32, 32))
            made = made.reshape(BM, BN)
            group = tl.program_id(0) * (BN // 32) + tl.arange(0, BN // 32)
            keep_scale = live[:, None] & (group < I // 32)[None, :]
            tl.store(inner_scale + at * (I // 32) + group[None, :], scale, mask=keep_scale)
        tl.store(inner + at * I + out[None, :], made.to(inner.dtype.element_ty), mask=keep)


@jit
def down_kernel(
    inner, inner_scale, w2, s2, expert, first, end, rows, I, L,
    FORM: tl.constexpr, WHOLE: tl.constexpr, UNIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    e = tl.load(expert + block).to(tl.int64)
    if e != -1:
        place = tl.load(first + block) + tl.arange(0, BM)
        live, at = place < tl.load(end + block), place.to(tl.int64)
        out = tl.program_id(0) * BN + tl.arange(0, BN)
        row = tl.minimum(out, L - 1)
        total = tl.zeros((BN, BM), tl.float32)
        for col in range(0, tl.where(e < 0, 0, I), BK):  # rows of nobody stay zero
            a = rows_of(inner, at, live, col, I, I, WHOLE, BK)
            a_scale = scales_of(inner_scale, at, live, col, I, WHOLE, FORM, BK)
            p, s = weights_of(w2, s2, e, row, L, col, I, WHOLE, BK)
            total = times(p, s, a, a_scale, total, FORM, BN, BK)
        made = tl.trans(total * UNIT).to(rows.dtype.element_ty)
        keep = live[:, None] & (out < L)[None, :]
        tl.store(rows + at[:, None] * L + out[None, :], made, mask=keep)


@jit
def quantised(x):
    """x [.., 32] float32 -> (e4m3 alike, scale bytes [..]), by the smallest scale that clips nothing."""
    largest = tl.max(tl.abs(x), 2).to(tl.int32, bitcast=True)
    exponent = (largest + 0x1FFFFF) >> 23  # one more where the largest is over 1.75 of its power of two
    exponent = tl.maximum(exponent - 8, 1)
    unit = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return (x * unit[:, :, None]).to(tl.float8e4nv), exponent.to(tl.uint8)


def objection(
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
) -> str | None:
    """Why these arguments are not for here, or None."""
    weights = w1, w1_scale, w3, w3_scale, w2, w2_scale
    return no_gpu(z, ids, *weights) or first_objection(
        wrong_dtype(z),
        not_rows(z=z),
        None if all(w.is_contiguous() for w in weights) else "weights with gaps",
        None if ids.stride(1) == 1 else "the experts of a token are not side by side",
        None if z.shape[1] % 32 == 0 and w1.shape[1] % 32 == 0 else "columns that fill no whole scale",
    )


@experts_unfinalized.impl("triton", objection=objection, note="weights as packed, rows as they are")
def experts_triton(
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
    """As the meaning, with its roundings: the inner activation and the result have z's dtype."""
    return run(z, ids, (w1, w1_scale, w3, w3_scale, w2, w2_scale), beta, linear_beta, form_of(z))


def form_of(z: Tensor) -> str:
    """How weights and rows meet on the part a launch is for now."""
    if z.dtype == torch.float32:
        return "float32"
    return "scaled" if block_scaled() else "registers"


def run(
    z: Tensor, ids: Tensor, weights: tuple[Tensor, ...], beta: float, linear_beta: float, form: str
) -> tuple[Tensor, Tensor]:
    """The same with the weights as one argument and in a given form, all but mxfp8 of which are for here."""
    top_k, (experts, inner_size) = ids.shape[1], weights[0].shape[:2]
    gate, down = expert_tiles(form, ids.numel(), experts)
    done = sorted_by_expert(ids, experts, gate.constants["BM"])
    inner = z.new_empty(ids.numel(), inner_size)
    gate_up(z, None, done, weights[:4], inner, None, top_k, beta, linear_beta, form, gate)
    return multiply_down(inner, None, done, weights[4:], z, form, down), done.idx


def gate_up(z, z_scale, done, weights, inner, inner_scale, top_k, beta, linear_beta, form, chosen) -> None:
    """inner [N, I] = situ(w1 z, w3 z) of the rows as they were sorted."""
    inner_size, latent, at = weights[0].shape[1], z.shape[1], chosen.constants
    launch(
        gate_up_kernel, (blocks(inner_size, at["BN"]), len(done.expert)),
        z, z_scale, done.order, *weights, done.expert, done.first, done.end, inner, inner_scale,
        z.stride(0), inner_size, latent, beta, linear_beta,
        TOP_K=top_k, CAPPED=beta != 0.0, FORM=form, WHOLE=latent % at["BK"] == 0, UNIT=unit_of(form), **at,
        num_warps=chosen.warps, num_stages=chosen.stages,
    )  # fmt: skip


def multiply_down(inner, inner_scale, done, weights, like, form, chosen) -> Tensor:
    """rows [N, L] = w2 inner, in the dtype of ``like``."""
    (choices, inner_size), latent, at = inner.shape, weights[0].shape[1], chosen.constants
    rows = like.new_empty(choices, latent)
    launch(
        down_kernel, (blocks(latent, at["BN"]), len(done.expert)),
        inner, inner_scale, *weights, done.expert, done.first, done.end, rows, inner_size, latent,
        FORM=form, WHOLE=inner_size % at["BK"] == 0, UNIT=unit_of(form), **at,
        num_warps=chosen.warps, num_stages=chosen.stages,
    )  # fmt: skip
    return rows


def unit_of(form: str) -> float:
    return UNIT if form == "registers" else 1.0
