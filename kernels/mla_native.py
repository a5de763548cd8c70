"""Latent attention in C++ on a CPU, over pages as they lie.

decode, verify    kv_b goes into the queries    mla_few_native
prompts           kv_b goes into the context    mla_prefill_native, wherever that is less to compute

kv_b may be kept in bfloat16: it is read as it is.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from . import mla_few_native, mla_prefill_native
from .mla import Row, mla_attend, widths
from .mla_few_native import NOTE, Piece, attend_few
from .mla_prefill_native import attend_many, pays
from .native import left_to_meaning


def objection(q, kv_b, pages, table, seen, cu, scale) -> str | None:
    """Why these arguments are not for here, or None; the first answer compiles the kernels."""
    return mla_few_native.objection((q,), kv_b, pages, kv_b.shape[1]) or mla_prefill_native.cannot()


@mla_attend.impl("native", objection=objection, note=NOTE)
def attend_native(
    q: Tensor, kv_b: Tensor, pages: Tensor, table: Tensor, seen: Tensor, cu: Tensor, scale: float
) -> Tensor:
    """As the meaning; a row has the same bits in any batch."""
    if left_to_meaning("mla") or left_to_meaning("mla_prefill"):
        return mla_attend.meaning(q, kv_b, pages, table, seen, cu, scale)
    nope, _, value = widths(q, kv_b, pages)
    bounds, before = cu.tolist(), seen.tolist()
    out = q.new_empty(q.shape[0], q.shape[1], value)
    if bounds[-1] < q.shape[0]:
        out[bounds[-1] :] = 0.0
    rows = [Row(r, a, b - a, s) for r, ((a, b), s) in enumerate(zip(pairwise(bounds), before)) if b > a]
    many = [pays(row, kv_b.shape[1], nope + value) for row in rows]
    few = [row for row, expands in zip(rows, many) if not expands]
    limits = [row.seen + i + 1 for row in few for i in range(row.count)]
    places = [Piece(row.request, row.begin, row.count, row.context) for row in few]
    attend_few(q, kv_b, pages, table, places, limits, scale, out)
    attend_many(q, kv_b, pages, table, [row for row, expands in zip(rows, many) if expands], scale, out)
    return out
