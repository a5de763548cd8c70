"""Few queries a row over pages of latents in C++ on a CPU, kv_b taken into them; cpu/mla.cpp has the picture.

    tokens of a row     [ in pages | own rows ]     a query sees the first so many of them, its limit
    queries of a row    in pieces of up to FEW, which are held beside each other

What mla_attend, mla_attend_block and mla_attend_shard have in common. T token rows, H heads, L latent,
N pages of B tokens; n and r key widths without and with position, v value width.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .native import best_isa, library, threads, unavailable, unwritten

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
FEW = 16  # queries of a piece
LANES = 16  # that a vector may have
NOTE = "C++ that was compiled here"


class Piece(NamedTuple):
    """Some neighbouring queries of a request."""

    request: int
    begin: int  # first token row
    count: int  # token rows
    paged: int  # tokens of the request that are in pages
    own: int = 0  # the own row of the first that is not


def pieces(rows: Iterable[Piece]) -> Iterator[Piece]:
    """The rows cut so that no piece has more than FEW queries."""
    for row in rows:
        for first in range(0, row.count, FEW):
            yield row._replace(begin=row.begin + first, count=min(FEW, row.count - first))


def objection(given: tuple[Tensor, ...], kv_b: Tensor | None, pages: Tensor, latent: int) -> str | None:
    """Why nothing here is for ``given``, kv_b and pages, or None; the first answer compiles the kernel."""
    if pages.device.type != "cpu":
        return f"{pages.device.type} tensors"
    if wrong := sorted({str(t.dtype) for t in (*given, pages)} - {"torch.float32"}):
        return f"some arguments are {', '.join(wrong)}, not float32"
    if kv_b is not None and kv_b.dtype not in (torch.float32, torch.bfloat16):
        return f"kv_b is {kv_b.dtype}, not float32 or bfloat16"
    if latent % LANES:
        return f"latents of {latent} channels, not a multiple of {LANES}"
    if pages.stride(2) != 1 or (kv_b is not None and kv_b.stride(1) != 1):
        return "channels of kv_b or of pages are not side by side"
    return "vectors of four lanes gain nothing" if best_isa() == "portable" else unavailable("mla")


@functools.cache
def function(isa: str | None) -> ctypes._CFuncPtr:
    """The kernel of the library for ``isa``."""
    kernel = library("mla", isa).k3_mla_attend
    kernel.argtypes, kernel.restype = [*[POINTER] * 5, FLOAT, INT], None
    return kernel


def attend_few(
    q: Tensor,
    kv_b: Tensor | None,
    pages: Tensor,
    table: Tensor,
    rows: list[Piece],
    limits: list[int],
    scale: float,
    out: Tensor,
    own: Tensor | None = None,
    lse: Tensor | None = None,
    isa: str | None = None,
) -> None:
    """The rows, of which each may have many queries, piece by piece.

    q [T, H, n+r] with kv_b [H*(n+v), L] to out(a!) [T, H, v]; or absorbed queries [T, H, L+r] without it to
    out [T, H, L] and lse(a!) [H, T]. Channels of out and lse are side by side. limits: of every query of
    every row, one row after the other; no less than that of the query before. own [.., L+r]: tokens that are
    in no page. isa: default this CPU's best.
    """
    if not rows:
        return
    q = q if q.stride(2) == 1 else q.contiguous()
    if own is not None and own.stride(1) != 1:
        own = own.contiguous()
    table, cut = table.long().contiguous(), list(pieces(rows))
    latent, value = (out.shape[2], 0) if kv_b is None else (kv_b.shape[1], out.shape[2])
    rope = pages.shape[2] - latent
    nope = 0 if kv_b is None else q.shape[2] - rope
    sizes = [len(cut), q.shape[1], nope, rope, latent, value, *q.stride()[:2], *out.stride()[:2]]
    sizes += [0 if kv_b is None else kv_b.stride(0), *pages.stride()[:2], pages.shape[1], table.shape[1]]
    sizes += [kv_b is not None and kv_b.dtype == torch.bfloat16, 0 if lse is None else lse.stride(0)]
    sizes += [0 if own is None else own.stride(0)]
    unwritten()
    function(isa)(
        (POINTER * 6)(*(None if x is None else x.data_ptr() for x in (q, out, kv_b, pages, own, lse))),
        (INT * 18)(*sizes),
        table.data_ptr(),
        (INT * (5 * len(cut)))(*(n for piece in cut for n in piece)),
        (INT * len(limits))(*limits),
        scale,
        threads(),
    )
