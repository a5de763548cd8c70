"""Finds the one run of rows behind an index table that only repeats it, as gather and scatter want it.

    i [n]   i[:, None].expand(-1, 3) [n, 3]   i.view(1, n, 1) [1, n, 1]        axis 0, axis 1: each shows i

Followed are views that add or drop dimensions of size one, expand, and copies; a table that mixes two
dimensions is data.
"""

from __future__ import annotations

import torch
from k3compile.passes.graph import arguments, tensor
from torch import fx

aten, prims = torch.ops.aten, torch.ops.prims
COPIES = {
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.contiguous.default,
    aten._to_copy.default,
    aten.lift_fresh_copy.default,
    prims.convert_element_type.default,
    prims.device_put.default,
}
RESHAPES = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}


def run_behind(table: fx.Node, axis: int) -> fx.Node | None:
    """The 1-D node whose elements ``table`` shows along ``axis``, the same at every place of the others."""
    found: fx.Node | None = table
    while found is not None and tensor(found).dim() != 1:
        found, axis = step(found, axis)
    return found


def step(node: fx.Node, axis: int) -> tuple[fx.Node | None, int]:
    """The node that ``node`` shows and the axis there; None where it computes something else."""
    before = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(before, fx.Node) or tensor(before) is None:
        return None, 0
    if node.target in COPIES:
        return before, axis
    if node.target is aten.expand.default:
        return expanded(node, before, axis)
    return reshaped(node, before, axis) if node.target in RESHAPES else (None, 0)


def expanded(node: fx.Node, before: fx.Node, axis: int) -> tuple[fx.Node | None, int]:
    old, new = tensor(before), tensor(node)
    place = axis - (new.dim() - old.dim())
    kept = place >= 0 and arguments(node)["size"][axis] == -1
    return (before, place) if kept or (place >= 0 and same(old.shape[place], new.shape[axis])) else (None, 0)


def reshaped(node: fx.Node, before: fx.Node, axis: int) -> tuple[fx.Node | None, int]:
    """Both have one dimension that is not of size one, and so the same elements in the same order."""
    if node.target is aten.unsqueeze.default:
        new = arguments(node)["dim"] % tensor(node).dim()
        return (None, 0) if new == axis else (before, axis - (new < axis))
    if tensor(before).dim() == tensor(node).dim() == 1:
        return before, 0
    old, new = many(tensor(before)), many(tensor(node))
    return (before, old[0]) if len(old) == 1 and new == [axis] else (None, 0)


def many(t: torch.Tensor) -> list[int]:
    """Dimensions whose size is not known to be one."""
    return [dim for dim, size in enumerate(t.shape) if not (isinstance(size, int) and size == 1)]


def same(one: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    """Whether two sizes are one number or one expression."""
    symbolic = [isinstance(size, torch.SymInt) for size in (one, other)]
    return one.node.expr == other.node.expr if all(symbolic) else not any(symbolic) and one == other
