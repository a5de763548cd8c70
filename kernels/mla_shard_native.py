"""Attention to this rank's rows of a context in C++ on a CPU: queries come absorbed, results stay latent."""

from __future__ import annotations

from torch import Tensor

from . import mla_few_native
from .mla_few_native import NOTE, attend_few
from .mla_shard import mla_attend_shard
from .native import left_to_meaning


def objection(q, pages, table, seen, cu, place, latent, scale) -> str | None:
    """Why these arguments are not for here, or None; the first answer compiles the kernel."""
    return mla_few_native.objection((q,), None, pages, latent)


@mla_attend_shard.impl("native", objection=objection, note=NOTE, by_address=True)
def attend_shard_native(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    seen: Tensor,
    cu: Tensor,
    place: Tensor,
    latent: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """As the meaning; a row has the same bits in any batch."""
    if left_to_meaning("mla"):
        return mla_attend_shard.meaning(q, pages, table, seen, cu, place, latent, scale)
    heads, tokens = q.shape[:2]
    o, lse = q.new_empty(heads, tokens, latent), q.new_empty(heads, tokens)
    turned = q.transpose(0, 1), None, pages, table, seen, cu, scale, o.transpose(0, 1)
    attend_few(*turned, lse=lse, place=place)
    return o, lse
