"""Normalisations: RMS of a row, L2 of a head, and the RMS of a head under a sigmoid gate.

D row width, T token rows, H heads, K and V key and value channels.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .op import acc_of, op
from .samples import Draw

L2_EPS = 1e-6


@op()
def rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """x / rms(x), rounded to x's dtype, times the gain ``w``.  x [..., D], w [D] -> like x."""
    wide = acc_of(x)
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (unit.to(x.dtype) * w).to(x.dtype)


@rms_norm.fake
def _(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@rms_norm.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    draw = Draw(dtype)
    for shape in ((0, 24), (1, 24), (7, 24), (2, 3, 40)):
        yield draw.normal(*shape), draw.normal(shape[-1]), 1e-5
    yield draw.normal(5, 48)[:, 8:40], draw.normal(32), 1e-6


@op()
def add_rms_norm(x: Tensor, r: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum that goes on and its norm: s = x + r, rms_norm(s, w, eps).  x, r [..., D], w [D] -> like x."""
    s = x + r
    return s, rms_norm.meaning(s, w, eps)


@add_rms_norm.fake
def _(x: Tensor, r: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    s = x + r
    return s, torch.empty_like(s)


@add_rms_norm.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    draw = Draw(dtype)
    for tokens in (0, 1, 7):
        yield draw.normal(tokens, 24), draw.normal(tokens, 24), draw.normal(24), 1e-5
    yield draw.normal(5, 48)[:, 8:40], draw.normal(5, 32), draw.normal(32), 1e-6


@op()
def l2_norm(x: Tensor, scale: float) -> Tensor:
    """x / |x| * scale over the last dimension, 1e-6 inside the root.  x [..., K] -> like x."""
    wide = acc_of(x)
    inverse = torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2_EPS)
    return (wide * (inverse * scale)).to(x.dtype)


@l2_norm.fake
def _(x: Tensor, scale: float) -> Tensor:
    return torch.empty_like(x)


@l2_norm.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    draw = Draw(dtype)
    for shape in ((0, 3, 16), (1, 3, 16), (6, 2, 20)):
        yield draw.normal(*shape), 16**-0.5
    yield draw.normal(5, 96)[:, 32:64].view(5, 2, 16), 1.0
    yield torch.zeros(2, 2, 8, dtype=dtype), 1.0


@op()
def gated_rms_norm(x: Tensor, gate: Tensor, w: Tensor, eps: float) -> Tensor:
    """Norm first, then gain, then sigmoid gate; one rounding.  x, gate [T, H, V], w [V] -> like gate."""
    wide = acc_of(x)
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (unit * w * torch.sigmoid(acc_of(gate))).to(gate.dtype).contiguous()


@gated_rms_norm.fake
def _(x: Tensor, gate: Tensor, w: Tensor, eps: float) -> Tensor:
    return gate.new_empty(gate.shape)


@gated_rms_norm.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    draw = Draw(dtype)
    for tokens in (0, 1, 9):
        yield draw.normal(tokens, 3, 20), draw.normal(tokens, 3, 20), draw.normal_acc(20), 1e-5
    yield draw.normal(4, 2, 16), draw.normal(4, 2, 48)[..., 16:32], draw.normal_acc(16), 1e-5
