"""Weigh and sum the rows of experts in Triton, alone or with the norm that follows on one rank.

    rows [N, L], w [T, k], idx [T, k] --> y [T, L]            finalize: a program 512 columns of a token
                                      --> y / rms(y) * norm   latent_tail: a program a token; then torch's
                                                              product onto the shared part, which it adds

A hole reads neither a row nor its weight. T token rows, k experts a token, N rows, L latent.
"""

import torch
from torch import Tensor

from .jit_triton import blocks, first_objection, jit, launch, no_gpu, not_rows, power_of_two, tl, wrong_dtype
from .latent_tail import latent_tail, left_to_tiers
from .moe import finalize
from .norm_triton import too_long

COLUMNS = 512  # 16 bytes of bfloat16 for each thread of two warps
WARPS = 8  # of a whole row, so that a thread holds few of the k rows it asks for at once


@jit
def summed(
    rows, w, idx, token, col, live, rows_row, w_row, idx_row, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """sum_j w[token, j] rows[idx[token, j]] of some columns, in the order of j."""
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP_K):
        at = tl.load(idx + token * idx_row + j).to(tl.int64)
        here = at >= 0
        weight = tl.load(w + token * w_row + j, mask=here, other=0.0).to(tl.float32)
        row = tl.load(rows + at * rows_row + col, mask=live & here, other=0.0).to(tl.float32)
        total += weight * row
    return total


@jit
def finalize_kernel(
    rows, w, idx, y, rows_row, w_row, idx_row, L, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token, col = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = col < L
    total = summed(rows, w, idx, token, col, live, rows_row, w_row, idx_row, TOP_K, BLOCK)
    tl.store(y + token * L + col, total.to(y.dtype.element_ty), mask=live)


@jit
def finalize_norm_kernel(
    rows, w, idx, norm_w, y, rows_row, w_row, idx_row, L, eps, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token, col = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    live = col < L
    total = summed(rows, w, idx, token, col, live, rows_row, w_row, idx_row, TOP_K, BLOCK)
    unit = total * tl.rsqrt(tl.sum(total * total, 0) / L + eps)
    gain = tl.load(norm_w + col, mask=live, other=0.0).to(tl.float32)
    tl.store(y + token * L + col, (unit * gain).to(y.dtype.element_ty), mask=live)


def objection(rows: Tensor, w: Tensor, idx: Tensor) -> str | None:
    """Why these arguments are not for here, or None."""
    dense = None if w.stride(1) == 1 and idx.stride(1) == 1 else "the k of a token are not side by side"
    return no_gpu(rows, w, idx) or first_objection(wrong_dtype(rows, w), not_rows(rows=rows), dense)


@finalize.impl("triton", objection=objection)
def finalize_triton(rows: Tensor, w: Tensor, idx: Tensor) -> Tensor:
    """As the meaning, one rounding."""
    y = rows.new_empty(idx.shape[0], rows.shape[1])
    grid = (idx.shape[0], blocks(rows.shape[1], COLUMNS))
    args = (rows, w, idx, y, rows.stride(0), w.stride(0), idx.stride(0), rows.shape[1])
    launch(finalize_kernel, grid, *args, TOP_K=idx.shape[1], BLOCK=COLUMNS, num_warps=2)
    return y


def tail_objection(rows, w, idx, norm_w, up_w, shared_partial, eps, group) -> str | None:
    """Why these arguments are not for here, or None."""
    same = rows.dtype == up_w.dtype == shared_partial.dtype
    differ = None if same else "rows, weights and shared part differ"
    return (
        left_to_tiers(group)
        or objection(rows, w, idx)
        or no_gpu(norm_w, up_w, shared_partial)
        or first_objection(differ, too_long(rows.shape[1]))
    )


@latent_tail.impl("triton", objection=tail_objection, note="the up-projection by torch")
def latent_tail_triton(
    rows: Tensor,
    w: Tensor,
    idx: Tensor,
    norm_w: Tensor,
    up_w: Tensor,
    shared_partial: Tensor,
    eps: float,
    group: str,
) -> Tensor:
    """As the meaning on one rank, with the normed latent rounded to the weights' dtype for the product."""
    y = rows.new_empty(idx.shape[0], rows.shape[1])
    block = power_of_two(rows.shape[1])
    args = (rows, w, idx, norm_w, y, rows.stride(0), w.stride(0), idx.stride(0), rows.shape[1], eps)
    constants = {"TOP_K": idx.shape[1], "BLOCK": block}
    launch(finalize_norm_kernel, (idx.shape[0],), *args, **constants, num_warps=WARPS)
    return torch.addmm(shared_partial, y, up_w.t())
