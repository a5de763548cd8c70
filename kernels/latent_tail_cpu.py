"""The latent tail in float32 on a CPU: weigh, sum and norm, then one product onto the shared part.

    rows, idx, w --cpu/latent_tail.cpp--> unit --up_w--> + shared

A bfloat16 up_w is read as it is where its kernel can be had (linear_native.py). Without a compiler torch does
the first part as well; its bag cannot skip holes, so a step that has any is then computed by the meaning.
Over several ranks latent_tail_tiers.py is for it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .latent_tail import latent_tail, left_to_tiers, normed, reduced
from .linear_native import linear_native
from .native import entry, threads, unavailable


def objection(rows, w, idx, norm_w, up_w, shared_partial, eps, group) -> str | None:
    """Why these arguments are not for here, or None."""
    if elsewhere := left_to_tiers(group):
        return elsewhere
    if rows.device.type != "cpu":
        return f"{rows.device.type} tensors"
    dtypes = {t.dtype for t in (rows, w, shared_partial)}
    if dtypes != {torch.float32}:
        return f"rows, weights and shared part are {', '.join(sorted(map(str, dtypes)))}, not float32"
    return None


@latent_tail.impl("cpu", objection=objection, by_address=True)
def latent_tail_cpu(
    rows: Tensor,
    w: Tensor,
    idx: Tensor,
    norm_w: Tensor,
    up_w: Tensor,
    shared_partial: Tensor,
    eps: float,
    group: str,
) -> Tensor:
    """As the meaning."""
    if group == "" and unavailable("latent_tail") is None:
        return projected(units(rows, w, idx, norm_w, eps), up_w, shared_partial)
    if bool((idx < 0).any()):
        return latent_tail.meaning(rows, w, idx, norm_w, up_w, shared_partial, eps, group)
    y = F.embedding_bag(idx, rows, mode="sum", per_sample_weights=w)
    y, shared = reduced(y, rows.dtype, shared_partial, group)
    return projected(normed(y, norm_w, eps), up_w, shared)


def units(rows: Tensor, w: Tensor, idx: Tensor, norm_w: Tensor, eps: float, isa: str | None = None) -> Tensor:
    """The normed sums [T, L]; isa: an instruction set (default: this CPU's best). Raises CannotBuild."""
    rows, w, idx = (t if t.stride()[1] == 1 else t.contiguous() for t in (rows, w, idx))
    norm_w = norm_w.to(torch.float32).contiguous()
    (tokens, top_k), latent = idx.shape, rows.shape[1]
    unit = rows.new_empty(tokens, latent)
    entry("latent_tail", "k3_latent_units", "12qdq", isa)(
        rows.data_ptr(),
        w.data_ptr(),
        norm_w.data_ptr(),
        idx.data_ptr(),
        unit.data_ptr(),
        rows.stride()[0],
        w.stride()[0],
        idx.stride()[0],
        idx.dtype is torch.int32,
        tokens,
        top_k,
        latent,
        eps,
        threads(),
    )
    return unit


def joined(up: Tensor, shared: Tensor, isa: str | None = None) -> Tensor:
    """up(a!) [T, D], dense, with shared [T, D] added, as add_ would. isa as above. Raises CannotBuild."""
    shared = shared if shared.stride()[1] == 1 else shared.contiguous()
    entry("latent_tail", "k3_latent_join", "6q", isa)(
        up.data_ptr(), shared.data_ptr(), *up.shape, shared.stride()[0], threads()
    )
    return up


def projected(unit: Tensor, up_w: Tensor, shared: Tensor) -> Tensor:
    """up_w unit + shared, [T, D]."""
    if up_w.dtype == torch.bfloat16 and unavailable("linear") is None:
        up = linear_native(unit, up_w)
        return joined(up, shared) if unavailable("latent_tail") is None else up.add_(shared)
    return torch.addmm(shared, unit, up_w.to(unit.dtype).t())
