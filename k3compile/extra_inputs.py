"""The tensors behind the inputs that passes add to a graph (:mod:`.passes.extra_inputs`), found at each call.

compiled(x, state)  ->  inner(x, state, SUPPLIERS["export_offset"](x, state))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .passes.extra_inputs import ExtraInput

Supplier = Callable[[Sequence[Any]], Tensor]
SUPPLIERS: dict[str, Supplier] = {}  # key -> what to append, given the arguments of the call
PER_GRAPH: dict[str, Callable[[ExtraInput], Supplier]] = {}  # key, or its part up to ":" -> makes a supplier


def supplied(compiled: Callable[..., Any], extras: Sequence[ExtraInput]) -> Callable[..., Any]:
    """``compiled`` as the caller knows it: called without the added inputs."""
    if not extras:
        return compiled
    suppliers = [supplier_of(extra) for extra in extras]

    def call(*args: Any) -> Any:
        return compiled(*args, *[supply(args) for supply in suppliers])

    return call


def supplier_of(extra: ExtraInput) -> Supplier:
    """The supplier of a key, or one made for this graph, which knows the size of its input."""
    if extra.key in SUPPLIERS:
        return SUPPLIERS[extra.key]
    head, colon, _ = extra.key.partition(":")
    return PER_GRAPH[head + colon](extra)
