"""Latent attention in C++ on a CPU, over pages as they lie.

decode, verify    kv_b goes into the queries    mla_few_native
prompts           kv_b goes into the context    mla_prefill_native, wherever that is less to compute

kv_b may be kept in bfloat16: it is read as it is.
"""

from __future__ import annotations

from torch import Tensor

from . import mla_few_native, mla_prefill_native
from .mla import mla_attend, widths
from .mla_few_native import NOTE, attend_few
from .mla_prefill_native import attend_many
from .native import left_to_meaning


def objection(q, kv_b, pages, table, seen, cu, scale) -> str | None:
    """Why these arguments are not for here, or None; the first answer compiles the kernels."""
    return mla_few_native.objection((q,), kv_b, pages, kv_b.shape[1]) or mla_prefill_native.cannot()


@mla_attend.impl("native", objection=objection, note=NOTE, by_address=True)
def attend_native(
    q: Tensor, kv_b: Tensor, pages: Tensor, table: Tensor, seen: Tensor, cu: Tensor, scale: float
) -> Tensor:
    """As the meaning; a row has the same bits in any batch."""
    if left_to_meaning("mla") or left_to_meaning("mla_prefill"):
        return mla_attend.meaning(q, kv_b, pages, table, seen, cu, scale)
    out = q.new_empty(q.shape[0], q.shape[1], widths(q, kv_b, pages)[2])
    attend_few(q, kv_b, pages, table, seen, cu, scale, out, divided=True)
    attend_many(q, kv_b, pages, table, seen, cu, scale, out, divided=True)
    return out
