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


def supplied(compiled: Callable[..., Any], extras: Sequence[ExtraInput]) -> Callable[..., Any]:
    """``compiled`` as the caller knows it: called without the added inputs."""
    if not extras:
        return compiled
    suppliers = [SUPPLIERS[extra.key] for extra in extras]

    def call(*args: Any) -> Any:
        return compiled(*args, *[supply(args) for supply in suppliers])

    return call
