"""Many queries a row over pages of latents in C++ on a CPU, kv_b applied to these: cpu/mla_prefill.cpp.

    absorbed   met * 2L          + queries * L (n+v)       products a head, beside those of r
    expanded   met * (n+v)       + context * L (n+v)       and kv_b is turned once a call

``met``: the tokens that all queries of a row see together.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from .mla import Row, widths
from .native import library, threads, unavailable, unwritten

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
TURNING = 2  # tokens of context that cost to expand what it costs to turn kv_b


def pays(row: Row, latent: int, expanded_width: int) -> bool:
    """Whether keys and values had better be made for all of the context than kv_b taken into the queries."""
    met = row.count * row.seen + row.count * (row.count + 1) // 2
    return met * (2 * latent - expanded_width) > (row.seen + TURNING) * latent * expanded_width


def cannot() -> str | None:
    """Why there is no kernel, or None; may compile it."""
    return unavailable("mla_prefill")


@functools.cache
def function(isa: str | None) -> ctypes._CFuncPtr:
    """The kernel of the library for ``isa``."""
    kernel = library("mla_prefill", isa).k3_mla_prefill
    kernel.argtypes, kernel.restype = [*[POINTER] * 4, FLOAT, INT], None
    return kernel


def attend_many(
    q: Tensor,
    kv_b: Tensor,
    pages: Tensor,
    table: Tensor,
    rows: list[Row],
    scale: float,
    out: Tensor,
    isa: str | None = None,
) -> None:
    """Rows of any number of queries, shapes as mla_attend; out(a!) [T, H, v], its channels side by side."""
    if not rows:
        return
    q = q if q.stride(2) == 1 else q.contiguous()
    table, (nope, rope, value) = table.long().contiguous(), widths(q, kv_b, pages)
    sizes = [len(rows), q.shape[1], nope, rope, kv_b.shape[1], value, *q.stride()[:2], *out.stride()[:2]]
    sizes += [
        kv_b.stride(0),
        *pages.stride()[:2],
        pages.shape[1],
        table.shape[1],
        kv_b.dtype == torch.bfloat16,
    ]
    unwritten()
    function(isa)(
        (POINTER * 4)(*(x.data_ptr() for x in (q, out, kv_b, pages))),
        (INT * 16)(*sizes),
        table.data_ptr(),
        (INT * (5 * len(rows)))(*(n for r in rows for n in (r.request, r.begin, r.count, r.context, 0))),
        scale,
        threads(),
    )
