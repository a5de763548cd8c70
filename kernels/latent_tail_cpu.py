"""The latent tail in float32 on a CPU, in three calls of torch: bag, norm, product onto the shared part.

    rows, idx, w --embedding_bag--> y --> norm --addmm(shared, ., up_w.t())--> out

The bag weighs and sums without a tensor [T, k, L]. It cannot skip holes, so a step that has any is computed
by the meaning.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .latent_tail import latent_tail, normed, reduced


def objection(rows, w, idx, norm_w, up_w, shared_partial, eps, group) -> str | None:
    """Why these arguments are not for here, or None."""
    if rows.device.type != "cpu":
        return f"{rows.device.type} tensors"
    dtypes = {t.dtype for t in (rows, w, shared_partial)}
    if dtypes != {torch.float32}:
        return f"rows, weights and shared part are {', '.join(sorted(map(str, dtypes)))}, not float32"
    return None


@latent_tail.impl("cpu", objection=objection)
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
    """As the meaning; holes are looked for in the data."""
    if bool((idx < 0).any()):
        return latent_tail.meaning(rows, w, idx, norm_w, up_w, shared_partial, eps, group)
    y = F.embedding_bag(idx, rows, mode="sum", per_sample_weights=w)
    y, shared = reduced(y, rows.dtype, shared_partial, group)
    return torch.addmm(shared, normed(y, norm_w, eps), up_w.to(y.dtype).t())
