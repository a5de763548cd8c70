"""Attention residuals in Triton: a program a token, which reads each row once and keeps a running softmax.

    running sum, block 0, block 1, ..  ->  score  ->  peak, total, mixture [D]  ->  rounded (-> norm)

Only one row and the mixture are in registers, so any number of snapshots fits. T token rows, D width.
"""

import torch
from torch import Tensor

from .attn_res import add_mix_rms_norm, attn_res_mix, mix_rms_norm
from .jit_triton import first_objection, jit, launch, no_gpu, not_rows, power_of_two, tl, wrong_dtype
from .norm_triton import too_long, unit_of, warps_for


@jit
def mix_kernel(
    p, a, bank, norm_w, proj_w, w, s, y,
    p_row, a_row, bank_block, bank_row, num_blocks, D, eps, out_eps,
    ADD: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, col = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    live = col < D
    gain = tl.load(norm_w + col, mask=live, other=0.0).to(tl.float32)
    gain *= tl.load(proj_w + col, mask=live, other=0.0).to(tl.float32)
    own = tl.load(p + token * p_row + col, mask=live, other=0.0).to(tl.float32)
    if ADD:
        own += tl.load(a + token * a_row + col, mask=live, other=0.0).to(tl.float32)
        rounded = own.to(s.dtype.element_ty)
        tl.store(s + token * D + col, rounded, mask=live)
        own = rounded.to(tl.float32)
    peak = tl.sum(own * gain, 0) * tl.rsqrt(tl.sum(own * own, 0) / D + eps)
    total, mixed = 1.0, own
    bank += token * bank_row
    for _ in range(num_blocks):
        row = tl.load(bank + col, mask=live, other=0.0).to(tl.float32)
        bank += bank_block
        score = tl.sum(row * gain, 0) * tl.rsqrt(tl.sum(row * row, 0) / D + eps)
        top = tl.maximum(peak, score)
        fade, weight = tl.exp(peak - top), tl.exp(score - top)
        total = total * fade + weight
        mixed = mixed * fade + row * weight
        peak = top
    result = (mixed / total).to(y.dtype.element_ty)
    if NORM:
        unit = unit_of(result.to(tl.float32), D, out_eps).to(y.dtype.element_ty).to(tl.float32)
        result = (unit * tl.load(w + col, mask=live, other=0.0).to(tl.float32)).to(y.dtype.element_ty)
    tl.store(y + token * D + col, result, mask=live)


def objection(p: Tensor, blocks: Tensor, norm_w: Tensor, proj_w: Tensor, *rest: object) -> str | None:
    """rest: eps, and the gain and epsilon of the norm where there is one."""
    gains = [norm_w, proj_w, *(g for g in rest if isinstance(g, Tensor))]
    return no_gpu(p, blocks, *gains) or first_objection(
        wrong_dtype(p, blocks, *gains),
        not_rows(p=p, blocks=blocks),
        too_long(p.shape[1]),
        next((f"a gain with elements {g.stride(0)} apart" for g in gains if g.stride(0) != 1), None),
    )


def add_objection(p: Tensor, a: Tensor, *rest: object) -> str | None:
    same = None if p.dtype == a.dtype else f"adds {a.dtype} to {p.dtype}"
    return objection(p, *rest) or no_gpu(a) or first_objection(same, not_rows(a=a))


def mix(
    p: Tensor,
    a: Tensor | None,
    blocks: Tensor,
    norm_w: Tensor,
    proj_w: Tensor,
    eps: float,
    w: Tensor | None = None,
    out_eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(p + a, or nothing; the mixture, normed where ``w`` is given)."""
    y = p.new_empty(p.shape)
    s = y if a is None else torch.empty_like(y)
    block = power_of_two(p.shape[1])
    launch(
        mix_kernel, (p.shape[0],), p, a, blocks, norm_w, proj_w, w, s, y,
        p.stride(0), 0 if a is None else a.stride(0), blocks.stride(0), blocks.stride(1),
        blocks.shape[0], p.shape[1], eps, out_eps,
        ADD=a is not None, NORM=w is not None, BLOCK=block, num_warps=warps_for(block),
    )  # fmt: skip
    return s, y


@attn_res_mix.impl("triton", objection=objection)
def attn_res_mix_triton(p: Tensor, blocks: Tensor, norm_w: Tensor, proj_w: Tensor, eps: float) -> Tensor:
    """As the meaning."""
    return mix(p, None, blocks, norm_w, proj_w, eps)[1]


@mix_rms_norm.impl("triton", objection=objection)
def mix_rms_norm_triton(
    p: Tensor, blocks: Tensor, norm_w: Tensor, proj_w: Tensor, eps: float, w: Tensor, out_eps: float
) -> Tensor:
    """As the meaning: the mixture is rounded before it is normed."""
    return mix(p, None, blocks, norm_w, proj_w, eps, w, out_eps)[1]


@add_mix_rms_norm.impl("triton", objection=add_objection)
def add_mix_rms_norm_triton(
    p: Tensor,
    a: Tensor,
    blocks: Tensor,
    norm_w: Tensor,
    proj_w: Tensor,
    eps: float,
    w: Tensor,
    out_eps: float,
) -> tuple[Tensor, Tensor]:
    """As the meaning: the sum is rounded before it is scored."""
    return mix(p, a, blocks, norm_w, proj_w, eps, w, out_eps)
