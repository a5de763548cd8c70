"""Cells of latent attention for :mod:`.kernels`: case, kind, calls, bytes, FLOPs; the widths of ``small``.

Contexts are cut from pages in no order, and a sweep meets each once. H heads, n and r key widths without and
with position, v value width, L latent.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

WIDTHS = 8, 128, 64, 128, 256  # H, n, r, v, L
PAGE = 16  # tokens
Parts = Iterator[tuple[str, str, list[tuple], int, int]]


def attend(least: int) -> Parts:
    """One query after the other, each over a context of its own, with kv_b in either dtype; then a prompt."""
    (heads, nope, rope, value, latent), context = WIDTHS, 2048
    pages, tables, one = contexts(least, context)
    q, kv_b = torch.randn(context, heads, nope + rope), random_kv_b()
    where, scale = (torch.tensor([context - 1]), torch.tensor([0, 1])), (nope + rope) ** -0.5
    moved, both = len(tables) * one, latent * (nope + value)
    flops = len(tables) * heads * 2 * (context * (2 * latent + rope) + both)
    for kept, said in ((kv_b, ""), (kv_b.bfloat16(), ", kv_b in bfloat16")):
        calls = [(q[:1], kept, pages, pages_of, *where, scale) for pages_of in tables]
        yield f"a query over {context}{said}", "bandwidth", calls, moved, flops
    call = q, kv_b, pages, tables[0], torch.tensor([0]), torch.tensor([0, context]), scale
    met = context * (context + 1) // 2
    flops = heads * 2 * (met * (nope + rope + value) + context * both)
    moved = one + 4 * (q.numel() + kv_b.numel() + context * heads * value)
    yield f"a prompt of {context}", "compute", [call], moved, flops


def write(least: int) -> Parts:
    """New rows of one request after the other into its pages; read and written."""
    (*_, rope, _, latent), context = WIDTHS, 2048
    pages, tables, one = contexts(least, context)
    rows = torch.randn(len(tables), context, latent + rope)
    where = torch.tensor([0]), torch.tensor([0, context])
    calls = [(own, pages, pages_of, *where) for own, pages_of in zip(rows, tables)]
    yield f"a prompt of {context}", "read+write", calls, 2 * len(tables) * one, 0


def attend_block(least: int) -> Parts:
    """One block of seven drafts after the other, each behind a context of its own."""
    (heads, nope, rope, value, latent), context, rows = WIDTHS, 2048, 7
    pages, tables, one = contexts(least, context)
    q, kv_b = torch.randn(rows, heads, nope + rope), random_kv_b()
    own, scale = torch.randn(rows, latent + rope), (nope + rope) ** -0.5
    where = torch.tensor([context]), torch.tensor([0, rows])
    calls = [(q, kv_b, pages, pages_of, *where, own, scale) for pages_of in tables]
    products = (context + rows) * (2 * latent + rope) + latent * (nope + value)
    flops = len(tables) * rows * heads * 2 * products
    yield f"{rows} rows over {context}", "compute", calls, len(tables) * one, flops


def attend_shard(least: int) -> Parts:
    """One query of the heads of two ranks after the other, each over this rank's half of a context."""
    (heads, nope, rope, _, latent), context = WIDTHS, 2048
    pages, tables, one = contexts(least, context)
    q, place = torch.randn(2 * heads, 1, latent + rope), torch.tensor([0, 2, 1])
    where = torch.tensor([2 * context - 1]), torch.tensor([0, 1]), place
    calls = [(q, pages, pages_of, *where, latent, (nope + rope) ** -0.5) for pages_of in tables]
    flops = len(tables) * 2 * heads * 2 * context * (2 * latent + rope)
    yield f"a query over {context}", "bandwidth", calls, len(tables) * one, flops


def contexts(least: int, context: int) -> tuple[Tensor, tuple[Tensor, ...], int]:
    """Pages, a page table [1, P] for each request, and bytes of one's context: at least ``least`` in all."""
    _, _, rope, _, latent = WIDTHS
    one = context * (latent + rope) * 4
    requests = max(2, -(-least // one))
    table = torch.randperm(requests * context // PAGE).view(requests, -1)
    return torch.randn(table.numel(), PAGE, latent + rope), table.split(1), one


def random_kv_b() -> Tensor:
    """[H*(n+v), L] that leaves the size of what it expands."""
    heads, nope, _, value, latent = WIDTHS
    return torch.randn(heads * (nope + value), latent) * latent**-0.5


ATTENTIONS = {
    "mla_attend": attend,
    "mla_attend_block": attend_block,
    "mla_attend_shard": attend_shard,
    "mla_write": write,
}
