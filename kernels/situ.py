"""SiTU, the activation of every MLP: both branches softly capped, the sigmoid on the uncapped gate."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .op import acc_of, op
from .samples import Draw


@op()
def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta).  [..., I] -> like gate.

    beta 0.0 is the uncapped form of Kimi-Linear, silu(gate) * up. One rounding, to gate's dtype.
    """
    return situ_wide(acc_of(gate), acc_of(up), beta, linear_beta).to(gate.dtype).contiguous()


def situ_wide(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """The same without any rounding, for a caller that already holds accumulators."""
    if beta == 0.0:
        return torch.nn.functional.silu(gate) * up
    capped = torch.tanh(gate / beta) * beta * torch.sigmoid(gate)
    return capped * (torch.tanh(up / linear_beta) * linear_beta)


@situ.fake
def _(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    return gate.new_empty(gate.shape)


@situ.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    draw = Draw(dtype)
    for tokens in (0, 1, 7):
        yield draw.normal(tokens, 24) * 4, draw.normal(tokens, 24) * 30, 4.0, 25.0
    both = draw.normal(5, 32)
    yield both[:, :16], both[:, 16:], 4.0, 25.0
    yield both[:, :16], both[:, 16:], 0.0, 0.0
