"""MXFP4 experts with rows in MXFP8, on block-scaled matrix instructions: twice the rate, and coarser.

    z [T, L] --largest of 32 columns--> e4m3 [T, L], scale bytes [T, L / 32]
             --the kernels of moe_triton.py, form mxfp8--> rows [N, L]

The inner activation is quantised where it is made. Never chosen unless a user names it: rows keep three bits
of the seven that bfloat16 has. T token rows, L latent, N = T*k rows.
"""

import torch
from torch import Tensor

from .jit_triton import blocks, first_objection, jit, launch, tl
from .moe import experts_unfinalized
from .moe_sort_triton import sorted_by_expert
from .moe_triton import gate_up, multiply_down, quantised
from .moe_triton import objection as any_objection
from .op import Tolerance
from .tiles_triton import block_scaled, expert_tiles

TILE = {"BM": 8, "BK": 256}
TOLERANCE = Tolerance(float32=0.1, bfloat16=0.1)  # rows, then inner activations, are rounded by up to 1/16


@jit
def quantise_kernel(z, y, y_scale, z_row, T, L, BM: tl.constexpr, BK: tl.constexpr):
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    col = tl.program_id(1) * BK + tl.arange(0, BK)
    group = tl.program_id(1) * (BK // 32) + tl.arange(0, BK // 32)
    live, at = (row < T)[:, None], row.to(tl.int64)[:, None]
    x = tl.load(z + at * z_row + col[None, :], mask=live & (col < L)[None, :], other=0.0).to(tl.float32)
    value, scale = quantised(x.reshape(BM, BK // 32, 32))
    tl.store(y + at * L + col[None, :], value.reshape(BM, BK), mask=live & (col < L)[None, :])
    tl.store(y_scale + at * (L // 32) + group[None, :], scale, mask=live & (group < L // 32)[None, :])


def objection(z, ids, w1, w1_scale, w3, w3_scale, w2, w2_scale, beta, linear_beta) -> str | None:
    """Why these arguments are not for here, or None."""
    args = z, ids, w1, w1_scale, w3, w3_scale, w2, w2_scale, beta, linear_beta
    able = None if block_scaled() else "a GPU without block-scaled matrix instructions"
    return any_objection(*args) or first_objection(able)


@experts_unfinalized.impl(
    "triton_mxfp8", objection=objection, note="rows quantised to MXFP8", tolerance=TOLERANCE
)
def experts_mxfp8(
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
    """The meaning of rows, and of inner activations, that were rounded to MXFP8."""
    (tokens, latent), top_k, (experts, inner_size) = z.shape, ids.shape[1], w1.shape[:2]
    gate, down = expert_tiles("mxfp8", ids.numel(), experts)
    done = sorted_by_expert(ids, experts, gate.constants["BM"])
    z8, z_scale = eight_bits(z, tokens, latent)
    quantise(z, z8, z_scale)
    inner, inner_scale = eight_bits(z, ids.numel(), inner_size)
    weights = w1, w1_scale, w3, w3_scale
    gate_up(z8, z_scale, done, weights, inner, inner_scale, top_k, beta, linear_beta, "mxfp8", gate)
    return multiply_down(inner, inner_scale, done, (w2, w2_scale), z, "mxfp8", down), done.idx


def quantise(z: Tensor, values: Tensor, scale: Tensor) -> None:
    """Write z [T, L] into values [T, L], e4m3 or bytes that are, and scale [T, L / 32] uint8."""
    (tokens, latent), values = z.shape, values.view(torch.float8_e4m3fn)
    grid = (blocks(tokens, TILE["BM"]), blocks(latent, TILE["BK"]))
    launch(quantise_kernel, grid, z, values, scale, z.stride(0), tokens, latent, **TILE)


def eight_bits(like: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Room for MXFP8 rows."""
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=like.device)
    return values, torch.empty(rows, columns // 32, dtype=torch.uint8, device=like.device)
