"""The two parametrised maps of every layer, and the dtypes their weights are kept in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from k3compile.kernels import acc
from torch import Tensor, nn
from torch.nn import functional as F

from .parallel.ranks import Ranks


@dataclass(frozen=True)
class Placement:
    """Where parameters live and how precise they are."""

    dtype: torch.dtype  # of activations and norm gains
    resident: torch.dtype  # of matrices; they are cast to the activations' dtype where they are used
    device: torch.device
    ranks: Ranks  # that share every layer: modules are made with this rank's part

    @property
    def acc(self) -> torch.dtype:
        """Of the few tensors that a bfloat16 checkpoint keeps in float32."""
        return acc(self.dtype)

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """An unfilled parameter; nothing here is trained, and graphs differ by ``requires_grad``."""
        made = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return nn.Parameter(made, requires_grad=False)


class Linear(nn.Module):
    """y = x @ weight.T, weight [out, in]; no layer of these models has a bias."""

    def __init__(self, place: Placement, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = place.parameter(outputs, inputs, dtype=place.resident)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RmsNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, place: Placement, width: int, eps: float) -> None:
        super().__init__()
        self.weight = place.parameter(width)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.k3.rms_norm(x, self.weight, self.eps)
