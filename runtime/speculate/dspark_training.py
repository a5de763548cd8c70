"""Attention of many blocks to one sequence at once, for training the draft: dense, differentiable, no pages.

    block of anchor a    sees tokens 0 ..< a of its sequence, and its own K rows, the later ones too

B sequences of T tokens, A anchors a sequence, K rows a block, H heads, L latent, n and r key widths without
and with position, v value width.
"""

from __future__ import annotations

import torch
from k3compile.kernels import acc
from torch import Tensor


def dense_attention(
    q: Tensor, kv_b: Tensor, context: Tensor, own: Tensor, anchors: Tensor, block: int, scale: float
) -> Tensor:
    """q [B*A*K, H, n+r], kv_b [H*(n+v), L], context [B, T, L+r], own [B*A*K, L+r], anchors [B, A]
    -> [B*A*K, H, v] like q.
    """
    wide, heads, latent = acc(q.dtype), q.shape[1], kv_b.shape[1]
    shape = (*anchors.shape, block)
    nope = q.shape[2] - (context.shape[2] - latent)
    asked = q.to(wide).view(*shape, heads, -1) * scale  # [B, A, K, H, n+r]
    far_k, far_v = keys_and_values(context.to(wide), kv_b.to(wide), heads, nope)  # [B, T, H, *]
    near_k, near_v = keys_and_values(own.to(wide).view(*shape, -1), kv_b.to(wide), heads, nope)
    far = torch.einsum("bakhd,bthd->bahkt", asked, far_k)
    hidden = torch.arange(context.shape[1], device=q.device) >= anchors.unsqueeze(-1)  # [B, A, T]
    far = far.masked_fill(hidden[:, :, None, None], -torch.inf)
    near = torch.einsum("bakhd,bajhd->bahkj", asked, near_k)
    weights = torch.cat([far, near], -1).softmax(-1)
    seen, beside = weights.tensor_split((far.shape[-1],), dim=-1)
    mixed = torch.einsum("bahkt,bthv->bakhv", seen, far_v) + torch.einsum(
        "bahkj,bajhv->bakhv", beside, near_v
    )
    return mixed.flatten(0, 2).to(q.dtype)


def keys_and_values(rows: Tensor, kv_b: Tensor, heads: int, nope: int) -> tuple[Tensor, Tensor]:
    """Rows [..., L+r] expanded: keys [..., H, n+r], their last r shared by the heads, values [..., H, v]."""
    latent = kv_b.shape[1]
    both = (rows[..., :latent] @ kv_b.T).unflatten(-1, (heads, -1))
    shared = rows[..., None, latent:].expand(*rows.shape[:-1], heads, -1)
    return torch.cat([both[..., :nope], shared], -1), both[..., nope:]
