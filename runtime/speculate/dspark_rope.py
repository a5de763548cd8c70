"""Positions of the draft: rotary embedding of adjacent pairs, its frequencies stretched as YaRN does.

    frequency i of r/2    0 ......... low ......... high ......... r/2 - 1
                          as trained  blended       divided by ``factor``

A pair turns by position * frequency. The target has no positions at all; only its draft does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from k3compile.kernels import acc
from torch import Tensor


class Turn(NamedTuple):
    """By how much the pairs of each token turn: [T, r/2] each, in the accumulation dtype."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class Yarn:
    """Constants of ``rope_parameters``."""

    theta: float
    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float

    def correction_dim(self, turns: float, width: int) -> float:
        """The frequency, as a fractional number, that turns so often within the original context."""
        length = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return width * math.log(length) / (2 * math.log(self.theta))

    def ramp(self, width: int) -> tuple[int, int]:
        """(low, high): frequencies up to low stay, from high on they are divided by ``factor``."""
        low = math.floor(self.correction_dim(self.beta_fast, width))
        high = math.ceil(self.correction_dim(self.beta_slow, width))
        return max(low, 0), min(high, width - 1)

    def frequencies(self, width: int) -> Tensor:
        """[width / 2] float64 radians a token."""
        number = torch.arange(width // 2, dtype=torch.float64)
        base = self.theta ** (-2 * number / width)
        low, high = self.ramp(width)
        share = ((number - low) / max(high - low, 1e-3)).clamp(0, 1)  # of the stretched frequency
        return base * (1 - share) + base / self.factor * share

    def gain(self, scale: float) -> float:
        """What YaRN multiplies attention with for a longer context: 0.1 scale ln(factor) + 1."""
        return 0.1 * scale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def magnitude(self) -> float:
        """Factor of cosine and sine; 1 where both scales are the same."""
        return self.gain(self.mscale) / self.gain(self.mscale_all_dim)

    def softmax_scale(self, head_width: int) -> float:
        """Factor of the scores of heads of ``head_width``."""
        return head_width**-0.5 * self.gain(self.mscale_all_dim) ** 2

    def turn(self, positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Turn:
        """Positions [T] int64 -> how tokens turn. Angles in float64: a position may be a million."""
        angle = positions.double().unsqueeze(1) * frequencies
        return Turn(*((f(angle) * self.magnitude).to(acc(dtype)) for f in (torch.cos, torch.sin)))


def rotate(x: Tensor, turn: Turn) -> Tensor:
    """x [T, ..., r] with each pair (x[2i], x[2i+1]) turned, in the accumulation dtype -> like x."""
    shape = (x.shape[0], *[1] * (x.dim() - 2), -1)
    cos, sin = turn.cos.view(shape), turn.sin.view(shape)
    first, second = x.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2).to(x.dtype)
