"""What the KDA functions of several libraries have in common, said in k3 ops.

raw q, k -> normalised and scaled -> kda_scan, or kda_prefill over the rows of a packed batch -> o, state
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.op import acc


def wants_gradient(*values: Any) -> bool:
    """Whether autograd would record an op on these."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in values)


def refuse(function: str, what: str) -> ValueError:
    return ValueError(
        f"{function}: {what} is not computed by k3 ops; "
        "k3compile.unadopt(model) gives the model its own functions back"
    )


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    unit: bool,
    state: Tensor | None,
    cu: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """KDA of raw queries and keys [B, T, H, K] -> o like v, final [N, H, V, K] acc; no state is zeros.

    unit: queries and keys are normalised here. cu [N+1]: bounds of the N sequences packed into a batch of 1;
    without it N is B.
    """
    wide = acc(q.dtype)
    q, k, g, beta = (x.to(wide) for x in (q, k, g, beta))
    if unit:
        q, k = torch.ops.k3.l2_norm(q, scale), torch.ops.k3.l2_norm(k, 1.0)
    else:
        q = q * scale
    count = v.shape[0] if cu is None else cu.shape[0] - 1
    if state is None:
        state = q.new_zeros(count, v.shape[2], v.shape[3], k.shape[3])
    if cu is None:
        return torch.ops.k3.kda_scan(q, k, v, g, beta, state.to(wide))
    final = state.to(wide, copy=True, memory_format=torch.contiguous_format)
    rows = [x.flatten(0, 1) for x in (q, k, v, g, beta)]
    o = torch.ops.k3.kda_prefill(*rows, final, torch.arange(count, device=q.device), cu)
    return o.view(v.shape), final
