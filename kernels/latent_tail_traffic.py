"""What a rank sends and reads of the weight in a latent tail, by its tier, as sizes: numbers or symbols.

              collectives                              bytes of their operands    bytes of up_w
    fused     all-reduce, reduce-scatter, all-gather   T L + T D + T D / n        D L / n
    overlap   two all-reduces                          T L + T D                  D L
    column    two all-reduces                          T L + T D                  D L / n

On the wire a reduce-scatter and an all-gather take what one all-reduce takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .groups import ranks_of
from .latent_tail_tiers import FUSED_TOKENS, OVERLAP_TOKENS

Bytes = int | torch.SymInt


class Traffic(NamedTuple):
    """One rank's part in one call. up_to: the most token rows for which this holds; None: any number."""

    up_to: int | None
    collectives: int
    sent: Bytes
    weight: Bytes


def whole(rows, w, idx, norm_w, up_w, shared_partial, eps, group) -> tuple[Traffic, ...]:
    """Every rank multiplies the whole weight; nothing is sent where no group is named."""
    weight = up_w.numel() * up_w.element_size()
    if not group:
        return (Traffic(None, 0, 0, weight),)
    latent = idx.shape[0] * rows.shape[1] * rows.element_size()
    return (Traffic(None, 2, latent + shared_partial.numel() * shared_partial.element_size(), weight),)


def column(*args) -> tuple[Traffic, ...]:
    """Every rank multiplies its part of the weight."""
    (all_of_it,) = whole(*args)
    return (all_of_it._replace(weight=all_of_it.weight // (ranks_of(args[-1]) or 1)),)


def fused(*args) -> tuple[Traffic, ...]:
    """As the columns, and the results are gathered."""
    (part,) = column(*args)
    shared = args[5]
    gathered = shared.shape[0] * (shared.shape[1] // (ranks_of(args[-1]) or 1)) * shared.element_size()
    return (part._replace(collectives=3, sent=part.sent + gathered),)


def tiers(*args) -> tuple[Traffic, ...]:
    """Each tier up to its number of rows."""
    (few,), (some,), (many,) = fused(*args), whole(*args), column(*args)
    return few._replace(up_to=FUSED_TOKENS), some._replace(up_to=OVERLAP_TOKENS), many


def symm(*args) -> tuple[Traffic, ...]:
    """Few rows as the columns do, in kernels that read the other ranks' memory; the rest by its tier."""
    (few,), (_, some, many) = column(*args), tiers(*args)
    return few._replace(up_to=FUSED_TOKENS), some, many


COLLECTIVES: dict[str, Callable[..., tuple[Traffic, ...]]] = {  # overload -> its communication
    "latent_tail.default": whole,
    "latent_tail.cpu": whole,
    "latent_tail.tiers": tiers,
    "latent_tail.overlap": whole,
    "latent_tail.fused": fused,
    "latent_tail.column": column,
    "latent_tail.symm": symm,
}
