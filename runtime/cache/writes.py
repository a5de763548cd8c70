"""What is written into the pools between two steps: zeros for those who come, copies of states that are
kept, NaN for those who went.

A KDA state is summed into, so a stale one would silently continue somebody else's text. A latent page is
only read where its owner wrote. The NaN is for debugging: whatever reads something freed then shows it in
every token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .orders import Clear, Copy, Order
from .pools import KdaPools, MlaPools

Pools = Sequence[KdaPools | MlaPools]


def apply(pools: Pools, orders: Sequence[Order]) -> None:
    """Carry out what :meth:`Cache.take_writes` asked, in its order, in every layer."""
    for order in orders:
        if isinstance(order, Copy):
            copy(pools, order.sources, order.targets)
        elif isinstance(order, Clear):
            clear(pools, order.slots)
        else:
            poison(pools, order.slots, order.pages)


def clear(pools: Pools, slots: Sequence[int]) -> None:
    """Zero the state and the conv window of slots: a request starts from there."""
    for layer in pools:
        if isinstance(layer, KdaPools):
            rows = torch.tensor(slots, device=layer.state.device)
            layer.state.index_fill_(0, rows, 0.0)
            layer.window.index_fill_(0, rows, 0.0)


def poison(pools: Pools, slots: Sequence[int], pages: Sequence[int]) -> None:
    """Fill slots (and the records of verify steps, where a slot has them) and pages with NaN."""
    for layer in pools:
        numbers = slots if isinstance(layer, KdaPools) else pages
        for tensor in layer:
            inside = [number for number in numbers if number < tensor.shape[0]]
            if inside:
                tensor.index_fill_(0, torch.tensor(inside, device=tensor.device), torch.nan)


def poison_all(pools: Pools) -> None:
    """Fill everything with NaN: nothing is owned yet."""
    for layer in pools:
        for tensor in layer:
            tensor.fill_(torch.nan)


def copy(pools: Pools, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copy the state and the conv window of each source slot into the target slot at the same place."""
    if not sources:
        return
    for layer in pools:
        if isinstance(layer, KdaPools):
            old, new = (torch.tensor(s, device=layer.state.device) for s in (sources, targets))
            for tensor in (layer.state, layer.window):
                tensor.index_copy_(0, new, tensor.index_select(0, old))
