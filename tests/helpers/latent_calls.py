"""Arguments of latent attention whose pages are NaN wherever no token of a context lies."""

from __future__ import annotations

import torch
from k3compile.kernels.mla import paging
from k3compile.kernels.samples import Draw
from torch import Tensor

# (H, n, r, v, L)
WIDTHS = [(8, 128, 64, 128, 256), (3, 16, 8, 16, 32), (2, 5, 3, 4, 16), (1, 8, 0, 3, 48), (3, 8, 4, 6, 16)]
LENGTHS, SEEN = [1, 0, 9, 1, 2, 16], [0, 3, 40, 1100, 511, 505]


def call(
    lengths: list[int] = LENGTHS,
    seen: list[int] = SEEN,
    widths: tuple[int, ...] = WIDTHS[1],
    size: int = 4,
    seed: int = 0,
) -> list:
    """Arguments of mla_attend; pages, and rows of pages, that are nobody's are NaN."""
    (heads, nope, rope, value, latent), draw = widths, Draw(torch.float32, seed)
    count = sum(-(-(a + b) // size) for a, b in zip(lengths, seen)) + 3
    table, before, cu = paging(draw, lengths, seen, count, size)
    pages = torch.full((count, size, latent + rope), torch.nan)
    for pages_of, n, s in zip(table, lengths, seen):
        at = torch.arange(n + s)
        pages[pages_of[at // size], at % size] = draw.normal(n + s, latent + rope)
    q = draw.normal(sum(lengths), heads, nope + rope)
    kv_b = draw.normal(heads * (nope + value), latent) * latent**-0.5
    return [q, kv_b, pages, table, before, cu, (nope + rope) ** -0.5]


def in_float64(args: list) -> list:
    """The same numbers, floats as float64."""
    return [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]


def laid_out_otherwise(args: list, positions: dict[str, int]) -> list[list]:
    """The same arguments as parts of wider tensors, and with q's channels apart.

    positions: of q, kv_b, pages, table; those that are there.
    """
    wide, turned = list(args), list(args)
    for name, at in positions.items():
        given = args[at]
        doubled = torch.cat([given, given], -1)
        wide[at] = doubled[..., given.shape[-1] :] if name == "q" else doubled[..., : given.shape[-1]]
        if name == "table":
            wide[at] = wide[at].int()
    q = args[positions["q"]]
    turned[positions["q"]] = q.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    return [wide, turned]
