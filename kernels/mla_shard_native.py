"""Attention to this rank's rows of a context in C++ on a CPU: queries come absorbed, results stay latent."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from . import mla_few_native
from .mla_few_native import NOTE, Piece, attend_few
from .mla_shard import mla_attend_shard, visible
from .native import left_to_meaning


def objection(q, pages, table, seen, cu, place, latent, scale) -> str | None:
    """Why these arguments are not for here, or None; the first answer compiles the kernel."""
    return mla_few_native.objection((q,), None, pages, latent)


@mla_attend_shard.impl("native", objection=objection, note=NOTE)
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
    bounds, longest = cu.tolist(), visible(tokens, seen, cu, place).tolist()
    rows = [
        Piece(r, a, b - a, longest[b - 1]) for r, (a, b) in enumerate(pairwise(bounds)) if a < b <= tokens
    ]
    done = max((row.begin + row.count for row in rows), default=0)
    o[:, done:], lse[:, done:] = 0.0, -torch.inf
    limits = [longest[t] for row in rows for t in range(row.begin, row.begin + row.count)]
    attend_few(q.transpose(0, 1), None, pages, table, rows, limits, scale, o.transpose(0, 1), lse=lse)
    return o, lse
