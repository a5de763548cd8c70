"""SiTU, the activation of every MLP: both branches softly capped, the sigmoid on the uncapped gate."""

from __future__ import annotations

import torch
from torch import Tensor

from .op import acc_of, op


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
