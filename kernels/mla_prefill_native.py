"""Many queries a row over pages of latents in C++ on a CPU, kv_b applied to these: cpu/mla_prefill.cpp.

    absorbed   met * 2L          + queries * L (n+v)       products a head, beside those of r
    expanded   met * (n+v)       + context * L (n+v)       and kv_b is turned once a call

``met``: the tokens that all queries of a row see together. Which is less decides each row's way, in C++ as
well (cpu/latents.h): lengths are read there alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .mla import widths
from .mla_few_native import check
from .native import entry, longs, threads, unavailable


def cannot() -> str | None:
    """Why there is no kernel, or None; may compile it."""
    return unavailable("mla_prefill")


def attend_many(
    q: Tensor,
    kv_b: Tensor,
    pages: Tensor,
    table: Tensor,
    seen: Tensor,
    cu: Tensor,
    scale: float,
    out: Tensor,
    divided: bool = False,
    isa: str | None = None,
) -> None:
    """Requests of any number of queries, shapes as mla_attend; out(a!) [T, H, v], its channels side by side.

    divided: only requests for which keys and values of their context cost less; mla_few_native has the
    others, and what is nobody's. Raises ValueError for a request that needs more pages than the table has.
    """
    q = q if q.stride()[2] == 1 else q.contiguous()
    table, seen, cu, (nope, rope, value) = longs(table), longs(seen), longs(cu), widths(q, kv_b, pages)
    (requests, columns), (tokens, heads, _), size = table.shape, q.shape, pages.shape[1]
    check(
        entry("mla_prefill", "k3_mla_prefill", "25qdq", isa)(
            *(t.data_ptr() for t in (q, out, kv_b, pages, table, seen, cu)),
            *(requests, tokens, heads, nope, rope, kv_b.shape[1], value),
            *q.stride()[:2],
            *out.stride()[:2],
            kv_b.stride()[0],
            *pages.stride()[:2],
            size,
            columns,
            kv_b.dtype is torch.bfloat16,
            divided,
            scale,
            threads(),
        ),
        columns * size,
    )
