"""Attention Residuals: a softmax over depth, per token, of the running sum and the banked snapshots.

    blocks [n, T, D] --score--> [n, T] --+
                                         softmax over n + 1 --> weights of the raw rows
    p         [T, D] --score--> [1, T] --+

Scores use the normalised rows, the mixture the raw ones. T token rows, D width, n snapshots.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .norm import rms_norm
from .op import acc_of, op
from .samples import Draw


@op()
def attn_res_mix(p: Tensor, blocks: Tensor, norm_w: Tensor, proj_w: Tensor, eps: float) -> Tensor:
    """Mix p [T, D] with blocks [n, T, D] (n may be 0); norm_w and proj_w [D].  -> [T, D] like p.

    The rows are scored apart and only the scores meet, so the bank is never copied.
    """
    p_wide, b_wide = acc_of(p), acc_of(blocks)
    gain = acc_of(norm_w) * acc_of(proj_w)
    own, banked = score(p_wide, gain, eps), score(b_wide, gain, eps)  # [T], [n, T]
    scores = torch.cat([banked, own.unsqueeze(0)])
    top = scores.amax(0)
    total = top + torch.log(torch.exp(scores - top).sum(0))  # logsumexp, which asks whether it is empty
    mixed = (torch.exp(banked - total).unsqueeze(-1) * b_wide).sum(0)
    return (mixed + torch.exp(own - total).unsqueeze(-1) * p_wide).to(p.dtype)


def score(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """<x / rms(x), gain> over the last dimension."""
    return (x * gain).sum(-1) * torch.rsqrt(x.square().mean(-1) + eps)


@attn_res_mix.fake
def _(p: Tensor, blocks: Tensor, norm_w: Tensor, proj_w: Tensor, eps: float) -> Tensor:
    return p.new_empty(p.shape)


@attn_res_mix.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    draw = Draw(dtype)
    for blocks, tokens in ((0, 3), (1, 0), (1, 1), (2, 5), (8, 7)):
        yield draw.normal(tokens, 24), draw.normal(blocks, tokens, 24), draw.normal(24), draw.normal(24), 1e-5
    bank = draw.normal(4, 9, 24)
    yield bank[3, 2:7], bank[:3, 2:7], draw.normal(24), draw.normal(24), 1e-5


@op()
def mix_rms_norm(
    p: Tensor, blocks: Tensor, norm_w: Tensor, proj_w: Tensor, eps: float, w: Tensor, out_eps: float
) -> Tensor:
    """rms_norm(attn_res_mix(p, blocks, norm_w, proj_w, eps), w, out_eps): the input of a layer.  -> [T, D]"""
    return rms_norm.meaning(attn_res_mix.meaning(p, blocks, norm_w, proj_w, eps), w, out_eps)


@mix_rms_norm.fake
def _(
    p: Tensor, blocks: Tensor, norm_w: Tensor, proj_w: Tensor, eps: float, w: Tensor, out_eps: float
) -> Tensor:
    return p.new_empty(p.shape)


@mix_rms_norm.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    draw = Draw(dtype)
    for p, blocks, *gains, eps in attn_res_mix.each_sample(dtype):
        yield p, blocks, *gains, eps, draw.normal(p.shape[1]), 1e-6


@op()
def add_mix_rms_norm(
    p: Tensor,
    a: Tensor,
    blocks: Tensor,
    norm_w: Tensor,
    proj_w: Tensor,
    eps: float,
    w: Tensor,
    out_eps: float,
) -> tuple[Tensor, Tensor]:
    """The running sum s = p + a [T, D] and mix_rms_norm of it [T, D]: from attention to feed-forward."""
    s = p + a
    return s, mix_rms_norm.meaning(s, blocks, norm_w, proj_w, eps, w, out_eps)


@add_mix_rms_norm.fake
def _(p, a, blocks, norm_w, proj_w, eps, w, out_eps) -> tuple[Tensor, Tensor]:
    s = p + a
    return s, p.new_empty(p.shape)


@add_mix_rms_norm.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    draw = Draw(dtype)
    for p, *rest in mix_rms_norm.each_sample(dtype):
        yield p, draw.normal(*p.shape), *rest
