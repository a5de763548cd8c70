"""Finds where a Dynamo graph, in the user's own spelling, reads or writes rows by an index that is an input.

    x.index_select(0, i)   torch.gather(x, 1, i[:, None].expand(-1, 4))   x[:, i]   x[i] = y

The ATen graph has fewer spellings (:mod:`index_sites`), but only Dynamo's can be given another input.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from k3compile.passes.graph import tensor
from torch import fx

BY_INDEX = {"index_select", "index_copy", "gather", "scatter"}  # (x, dim, index, ...)
ROW_DTYPES = (torch.int64, torch.int32)
SAME_ROWS = {  # keep the values, and their order along the one dimension that has them
    *("view", "reshape", "expand", "expand_as", "view_as", "unsqueeze", "squeeze", "flatten"),
    *("to", "long", "int", "type", "contiguous", "clone", "detach"),
}


class IndexUse(NamedTuple):
    """``node`` indexes dimension ``dim`` of ``base`` by the input ``index``, perhaps through views of it."""

    node: fx.Node
    base: fx.Node
    dim: int
    index: fx.Node


def index_uses(graph: fx.Graph) -> Iterator[IndexUse]:
    """Every use of a 1-D integer input as an index of rows, in graph order."""
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        for base, dim, index in indexed(node):
            root = root_of(index)
            if root is not None and isinstance(base, fx.Node) and isinstance(dim, int):
                yield IndexUse(node, base, dim, root)


def indexed(node: fx.Node) -> Iterator[tuple[Any, Any, Any]]:
    """(base, dim, index) of a call that indexes rows; nothing for other calls."""
    name = called(node)
    if node.target in (operator.getitem, operator.setitem):
        yield from keyed(node.args[0], node.args[1])
    elif name == "index_put":
        yield from keyed(argument(node, 0, "self", "input"), argument(node, 1, "indices"))
    elif name == "take_along_dim":
        yield argument(node, 0, "input", "self"), argument(node, 2, "dim"), argument(node, 1, "indices")
    elif name in BY_INDEX:
        base = argument(node, 0, "self", "input")
        yield base, argument(node, 1, "dim"), argument(node, 2, "index")


def called(node: fx.Node) -> str:
    """The name of a function, a method or an op, without the underscore of its in-place form."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        target = target._opname
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name if name.startswith("__") else name.rstrip("_")


def argument(node: fx.Node, place: int, *names: str) -> Any:
    """An argument by position or by one of its names."""
    if place < len(node.args):
        return node.args[place]
    return next((node.kwargs[name] for name in names if name in node.kwargs), None)


def keyed(base: Any, key: Any) -> Iterator[tuple[Any, int, Any]]:
    """The one tensor in ``x[key]`` and the dimension it indexes."""
    items = list(key) if isinstance(key, (tuple, list)) else [key]
    rows = [item for item in items if isinstance(item, fx.Node) and tensor(item) is not None]
    if tensor(base) is None or len(rows) != 1:
        return
    dim = 0
    for item in items:
        if item is rows[0]:
            yield base, dim, item
            return
        if item is Ellipsis:
            taken = [one for one in items if one is not None and one is not Ellipsis]
            dim += tensor(base).dim() - len(taken)
        elif item is not None:
            dim += 1


def root_of(index: Any) -> fx.Node | None:
    """The 1-D integer input that ``index`` is, or shows in another shape or integer dtype."""
    while isinstance(index, fx.Node) and index.op != "placeholder":
        adds_dims = index.target is operator.getitem and only_adds_dims(index.args[1])
        if not adds_dims and called(index) not in SAME_ROWS:
            return None
        index = index.args[0] if index.args else None
    found = tensor(index)
    rows = found is not None and found.dim() == 1 and found.dtype in ROW_DTYPES
    return index if rows else None


def only_adds_dims(key: Any) -> bool:
    """Whether ``i[key]`` is all of ``i`` with dimensions of size one added, as in ``i[:, None]``."""
    items = key if isinstance(key, tuple) else (key,)
    whole = (None, Ellipsis, slice(None))
    return all(not isinstance(item, fx.Node) and item in whole for item in items)
