"""The norms in Triton: a program a row, which stays in registers between its sum and its result.

    x [D] (+ r [D]) --> s, rounded --> sum of squares --> s / rms, rounded --> times w

D row width, T token rows, H heads, K and V channels of a head.
"""

import torch
from torch import Tensor

from .jit_triton import first_objection, jit, launch, no_gpu, not_rows, power_of_two, tl, wrong_dtype
from .norm import L2_EPS, add_rms_norm, gated_rms_norm, l2_norm, rms_norm

LONGEST = 16384  # elements of a row that fit the registers of eight warps


@jit
def unit_of(x, D, eps):
    """x / rms(x) of a float32 row that is zero past D."""
    return x * tl.rsqrt(tl.sum(x * x, 0) / D + eps)


@jit
def rms_norm_kernel(
    x, r, w, s, y, x_row, r_row, D, eps, ADD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, col = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    live = col < D
    own = tl.load(x + row * x_row + col, mask=live, other=0.0).to(tl.float32)
    if ADD:
        own += tl.load(r + row * r_row + col, mask=live, other=0.0).to(tl.float32)
        rounded = own.to(s.dtype.element_ty)
        tl.store(s + row * D + col, rounded, mask=live)
        own = rounded.to(tl.float32)
    unit = unit_of(own, D, eps).to(y.dtype.element_ty).to(tl.float32)
    gain = tl.load(w + col, mask=live, other=0.0).to(tl.float32)
    tl.store(y + row * D + col, (unit * gain).to(y.dtype.element_ty), mask=live)


def warps_for(block: int) -> int:
    """One warp for 1024 elements, up to eight."""
    return min(8, max(1, block // 1024))


def too_long(width: int) -> str | None:
    """A row has to fit the registers, whatever its width will be."""
    if not isinstance(width, int):
        return "rows whose width is no constant"
    return f"rows of {width} elements, at most {LONGEST} fit" if width > LONGEST else None


def rms_norm_objection(x: Tensor, w: Tensor, eps: float) -> str | None:
    return no_gpu(x, w) or first_objection(wrong_dtype(x, w), not_rows(x=x, w=w), too_long(x.shape[-1]))


@rms_norm.impl("triton", objection=rms_norm_objection)
def rms_norm_triton(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """As the meaning; rows that are not evenly spaced are copied first."""
    rows = x.reshape(-1, x.shape[-1])
    y = torch.empty_like(rows, memory_format=torch.contiguous_format)
    block = power_of_two(rows.shape[1])
    args = (rows, None, w, None, y, rows.stride(0), 0, rows.shape[1], eps)
    launch(rms_norm_kernel, (len(rows),), *args, ADD=False, BLOCK=block, num_warps=warps_for(block))
    return y.view(x.shape)


def add_rms_norm_objection(x: Tensor, r: Tensor, w: Tensor, eps: float) -> str | None:
    return (
        rms_norm_objection(x, w, eps)
        or no_gpu(r)
        or first_objection(
            None if x.dtype == r.dtype else f"adds {r.dtype} to {x.dtype}",
            not_rows(r=r),
            None if len(x.shape) == len(r.shape) else "one addend is broadcast",
        )
    )


@add_rms_norm.impl("triton", objection=add_rms_norm_objection)
def add_rms_norm_triton(x: Tensor, r: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As the meaning: the sum is rounded before it is normed."""
    rows, more = x.reshape(-1, x.shape[-1]), r.expand(x.shape).reshape(-1, x.shape[-1])
    s, y = (torch.empty_like(rows, memory_format=torch.contiguous_format) for _ in range(2))
    block = power_of_two(rows.shape[1])
    args = (rows, more, w, s, y, rows.stride(0), more.stride(0), rows.shape[1], eps)
    launch(rms_norm_kernel, (len(rows),), *args, ADD=True, BLOCK=block, num_warps=warps_for(block))
    return s.view(x.shape), y.view(x.shape)


@jit
def l2_norm_kernel(
    x, y, x_token, x_head, H, K, scale, eps, HEADS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, col = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK)
    live = (head < H)[:, None] & (col < K)[None, :]
    at = token * x_token + head[:, None] * x_head + col[None, :]
    own = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
    scaled = own * (tl.rsqrt(tl.sum(own * own, 1) + eps) * scale)[:, None]
    tl.store(y + (token * H + head[:, None]) * K + col[None, :], scaled.to(y.dtype.element_ty), mask=live)


def l2_norm_objection(x: Tensor, scale: float) -> str | None:
    heads = None if len(x.shape) == 3 else f"{len(x.shape)} dimensions where [T, H, K] was expected"
    return no_gpu(x) or first_objection(wrong_dtype(x), heads, not_rows(x=x))


@l2_norm.impl("triton", objection=l2_norm_objection)
def l2_norm_triton(x: Tensor, scale: float) -> Tensor:
    """x [T, H, K] with any distance between tokens and between heads."""
    (tokens, heads, width), together = x.shape, 4
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    args = (x, y, x.stride(0), x.stride(1), heads, width, scale, L2_EPS)
    grid = (tokens, -(-heads // together))
    launch(l2_norm_kernel, grid, *args, HEADS=together, BLOCK=power_of_two(width), num_warps=1)
    return y


@jit
def gated_rms_norm_kernel(
    x, gate, w, y, x_token, x_head, gate_token, gate_head, H, V, eps, HEADS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, col = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK)
    live = (head < H)[:, None] & (col < V)[None, :]
    own = tl.load(x + token * x_token + head[:, None] * x_head + col[None, :], mask=live, other=0.0)
    own = own.to(tl.float32)
    unit = own * tl.rsqrt(tl.sum(own * own, 1) / V + eps)[:, None]
    gain = tl.load(w + col, mask=col < V, other=0.0).to(tl.float32)
    opened = tl.load(
        gate + token * gate_token + head[:, None] * gate_head + col[None, :], mask=live, other=0.0
    )
    result = unit * gain[None, :] * tl.sigmoid(opened.to(tl.float32))
    tl.store(y + (token * H + head[:, None]) * V + col[None, :], result.to(y.dtype.element_ty), mask=live)


def gated_rms_norm_objection(x: Tensor, gate: Tensor, w: Tensor, eps: float) -> str | None:
    return no_gpu(x, gate, w) or first_objection(wrong_dtype(x, gate, w), not_rows(x=x, gate=gate, w=w))


@gated_rms_norm.impl("triton", objection=gated_rms_norm_objection)
def gated_rms_norm_triton(x: Tensor, gate: Tensor, w: Tensor, eps: float) -> Tensor:
    """As the meaning, one rounding; x and gate [T, H, V] apart as they may be."""
    (tokens, heads, width), together = x.shape, 4
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    steps = (x.stride(0), x.stride(1), gate.stride(0), gate.stride(1))
    grid = (tokens, -(-heads // together))
    constants = {"HEADS": together, "BLOCK": power_of_two(width)}
    launch(gated_rms_norm_kernel, grid, x, gate, w, y, *steps, heads, width, eps, **constants, num_warps=1)
    return y
