"""Latent attention of blocks of drafts in C++ on a CPU: the block's own rows come after those in pages."""

from __future__ import annotations

from torch import Tensor

from . import mla_few_native
from .mla import widths
from .mla_block import mla_attend_block
from .mla_few_native import NOTE, attend_few
from .native import left_to_meaning


def objection(q, kv_b, pages, table, seen, cu, own, scale) -> str | None:
    """Why these arguments are not for here, or None; the first answer compiles the kernel."""
    return mla_few_native.objection((q, own), kv_b, pages, kv_b.shape[1])


@mla_attend_block.impl("native", objection=objection, note=NOTE, by_address=True)
def attend_block_native(
    q: Tensor, kv_b: Tensor, pages: Tensor, table: Tensor, seen: Tensor, cu: Tensor, own: Tensor, scale: float
) -> Tensor:
    """As the meaning; a block has the same bits in any batch."""
    if left_to_meaning("mla"):
        return mla_attend_block.meaning(q, kv_b, pages, table, seen, cu, own, scale)
    out = q.new_empty(q.shape[0], q.shape[1], widths(q, kv_b, pages)[2])
    attend_few(q, kv_b, pages, table, seen, cu, scale, out, own)
    return out
