"""What a functionalised call writes: a tensor of its list, or a view of one that it only describes.

    auto_functionalized_v2(op, .., _x_base_index=1, _x_slice_dim=0, _x_slice_start=2, _x_slice_end=5,
                           _all_bases=[a, b])          computes          op(.., x=b[2:5])

No node of the graph is that view. It is described as a slice, by size, stride and offset, or as the whole.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from k3compile.passes.graph import values
from torch import fx

SLICE, STRIDED = torch.ops.aten.slice.Tensor, torch.ops.aten.as_strided.default


class WrittenView(NamedTuple):
    """A written argument: ``view(base, *where)``, or ``base`` itself where ``view`` is None."""

    base: fx.Node
    view: torch._ops.OpOverload | None = None
    where: tuple[Any, ...] = ()  # of numbers, tuples of numbers, and nodes of numbers


def written_view(node: fx.Node, name: str) -> WrittenView | None:
    """What ``node`` writes as the argument ``name`` of its op; None where it was given no tensor."""
    kwargs = node.kwargs
    if (index := kwargs[f"_{name}_base_index"]) is None:
        return None
    base = kwargs["_all_bases"][index]
    for view, first, parts in (
        (SLICE, "slice_dim", ("slice_dim", "slice_start", "slice_end")),
        (STRIDED, "storage_offset", ("size", "stride", "storage_offset")),
    ):
        if f"_{name}_{first}" in kwargs:
            return WrittenView(base, view, tuple(kwargs[f"_{name}_{part}"] for part in parts))
    return WrittenView(base)


def written_value(node: fx.Node, name: str) -> torch.Tensor | None:
    """The fake tensor that the op is given as ``name``: strides and offset are those of the view."""
    found = written_view(node, name)
    if found is None:
        return None
    base, where = values((found.base, found.where))
    return base if found.view is None else found.view(base, *where)
