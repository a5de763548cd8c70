"""The two ends of attention that stays latent: into the latents' space with a query, out of it with a mean.

    q [T, H, n+r]   q_nope @ kv_b's keys | q_pe   ->  [H, T, L+r]     what a page's rows are multiplied by
    z [H, T, L]     z @ kv_b's values             ->  [H, T, v]

Heads come first: those of several ranks are then one after the other, as collectives lay them.
T token rows, H heads, L latent, n and r key widths without and with position, v value width.

Both are one product for all heads. Inductor 2.13 asks of such a product whether it has one row, which nobody
knows, so they stay one call; opened, they are a product a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .op import acc, op
from .samples import Draw

Product = Callable[[Tensor, Tensor], Tensor]


@op(opaque=True)
def mla_absorb(q: Tensor, kv_b: Tensor, nope: int) -> Tensor:
    """q [T, H, n+r], kv_b [H*(n+v), L], nope = n -> [H, T, L+r] acc.

    Not rounded to q's dtype: where attention is sharp, that error would be larger than all others.
    """
    return absorbed(q, kv_b, nope, torch.bmm)


def absorbed(q: Tensor, kv_b: Tensor, nope: int, product: Product) -> Tensor:
    """The meaning of mla_absorb, with ``product`` of [H, T, n] and [H, n, L]."""
    wide, heads = acc(q.dtype), q.shape[1]
    keys = kv_b.to(wide).unflatten(0, (heads, -1))[:, :nope]  # [H, n, L]
    heads_first = q.transpose(0, 1)  # [H, T, n+r]
    latent = product(heads_first[..., :nope].to(wide), keys)
    return torch.cat([latent, heads_first[..., nope:].to(wide)], -1)


def by_head(a: Tensor, b: Tensor) -> Tensor:
    """a [H, T, x] @ b [H, x, y] -> [H, T, y], one head after the other."""
    return torch.stack([torch.mm(one, two) for one, two in zip(a.unbind(), b.unbind(), strict=True)])


@mla_absorb.opened
def _(q: Tensor, kv_b: Tensor, nope: int) -> Tensor:
    return absorbed(q, kv_b, nope, by_head)


@mla_absorb.fake
def _(q: Tensor, kv_b: Tensor, nope: int) -> Tensor:
    return q.new_empty(q.shape[1], q.shape[0], kv_b.shape[1] + q.shape[2] - nope, dtype=acc(q.dtype))


@mla_absorb.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    draw = Draw(dtype)
    for tokens, heads in ((0, 3), (1, 1), (5, 3)):
        q = draw.normal(tokens, heads, 20)[..., :12]
        yield q, draw.normal(heads * 14, 16) * 16**-0.5, 8


@op(opaque=True)
def mla_expand(z: Tensor, kv_b: Tensor, value: int) -> Tensor:
    """z [H, T, L] acc, kv_b [H*(n+v), L], value = v -> [H, T, v] like kv_b, summed in acc."""
    return expanded(z, kv_b, value, torch.bmm)


def expanded(z: Tensor, kv_b: Tensor, value: int, product: Product) -> Tensor:
    """The meaning of mla_expand, with ``product`` of [H, T, L] and [H, L, v]."""
    wide, heads = acc(kv_b.dtype), z.shape[0]
    values = kv_b.to(wide).unflatten(0, (heads, -1))[:, -value:]  # [H, v, L]
    return product(z.to(wide), values.mT).to(kv_b.dtype)


@mla_expand.opened
def _(z: Tensor, kv_b: Tensor, value: int) -> Tensor:
    return expanded(z, kv_b, value, by_head)


@mla_expand.fake
def _(z: Tensor, kv_b: Tensor, value: int) -> Tensor:
    return kv_b.new_empty(z.shape[0], z.shape[1], value)


@mla_expand.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    draw = Draw(dtype)
    for tokens, heads in ((0, 3), (1, 1), (5, 3)):
        yield draw.normal_acc(heads, tokens, 16), draw.normal(heads * 14, 16) * 16**-0.5, 6
