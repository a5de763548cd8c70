"""The latent tail of few rows over the GPUs of a node: its two sums read the other ranks' memory directly.

    y, written into the buffer --one kernel--> norm --D/n rows of up_w--+
    shared part, written into the buffer, these columns plus that ------+--one kernel--> out

As the column tier, with kernels of symmetric memory in place of collectives: a message of a few rows takes
its time in launches and handshakes. Rows beyond go by their tier. On request only, since no GPU has run it:
``lower={"latent_tail": "symm"}``.
"""

from __future__ import annotations

from torch import Tensor

from . import symmetric_memory
from .groups import place_in
from .jit_triton import no_gpu
from .latent_tail import finalized, latent_tail, normed, readable
from .latent_tail_tiers import FUSED_TOKENS, divided, latent_tail_tiers
from .op import acc_of


def objection(rows, w, idx, norm_w, up_w, shared_partial, eps, group) -> str | None:
    """Why the ranks' memory cannot be read directly, or None."""
    return no_gpu(rows, w, idx, norm_w, up_w, shared_partial) or divided(
        rows, w, idx, norm_w, up_w, shared_partial, eps, group
    )


@latent_tail.impl("symm", objection=objection, note=f"symmetric memory up to {FUSED_TOKENS} rows, then tiers")
def latent_tail_symm(
    rows: Tensor,
    w: Tensor,
    idx: Tensor,
    norm_w: Tensor,
    up_w: Tensor,
    shared_partial: Tensor,
    eps: float,
    group: str,
) -> Tensor:
    """As the meaning; both sums are rounded to shared_partial's dtype, in which they travel."""
    if idx.shape[0] > FUSED_TOKENS:
        return latent_tail_tiers(rows, w, idx, norm_w, up_w, shared_partial, eps, group)
    rank, ranks = place_in(group)
    (tokens, width), dtype, latent = shared_partial.shape, shared_partial.dtype, rows.shape[1]
    own = slice(rank * width // ranks, (rank + 1) * width // ranks)
    room = symmetric_memory.shared_buffer(
        group, FUSED_TOKENS * max(width, latent), dtype, shared_partial.device
    )
    y = room[: tokens * latent].view(tokens, latent).copy_(finalized(readable(rows), w, idx))
    y = symmetric_memory.sum_of_buffers(y, group)
    product = normed(acc_of(y), norm_w, eps).to(dtype) @ up_w[own].to(dtype).t()
    partial = room[: tokens * width].view(tokens, width).copy_(shared_partial)
    partial[:, own] += product
    return symmetric_memory.sum_of_buffers(partial, group)
