"""A second body of Dynamo's graph, for calls whose index inputs are promised to be consecutive rows.

    def forward(self, x, i):                   def forward(self, x, i, starts):     starts: CPU int64 [n]
        return x.index_select(0, i)   ->           s = starts[0].item()
                                                   torch._check(s >= 0)
                                                   j = torch.arange(s, s + i.size(0))
                                                   torch._check(s + i.size(0) <= x.size(0))
                                                   return x.index_select(0, j)

Which indices are promised is known at each call, on the host; the caller picks the body. The checks are what
an index out of range would have raised, and what :mod:`contiguous_views` proves its views from.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import sympy
import torch
from k3compile.passes.extra_inputs import add_input
from k3compile.passes.graph import IN_PLACE_OPERATORS, infer, schema_writes, storage_id, tensor
from k3compile.passes.index_uses import index_uses
from k3compile.passes.runner import Context
from torch import fx

GENERIC, RANGES = "any index", "annotated ranges"  # the two bodies, as records and reports call them
STARTS = "annotated_starts"  # the added input
INT32_MOST = 2**31 - 1


class RangeInput(NamedTuple):
    """An input used as an index of rows: its place among the placeholders, and what the user calls it."""

    position: int
    name: str


def range_inputs(gm: fx.GraphModule) -> list[RangeInput]:
    """The inputs of a Dynamo graph for which a promise to be a range would help.

    Those used as an index of rows, that the graph neither writes nor gives back.
    """
    used = {use.index for use in index_uses(gm.graph)}
    return [
        RangeInput(place, spelling(node))
        for place, node in enumerate(gm.graph.find_nodes(op="placeholder"))
        if node in used and not shows(node, gm.graph)
    ]


def spelling(node: fx.Node) -> str:
    """``idx`` for the argument or local the input was read from; Dynamo's own name without a source."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", None)
    return name.replace("L['", "", 1).replace("']", "", 1) if name else node.name


def shows(index: fx.Node, graph: fx.Graph) -> bool:
    """Whether somebody could tell ``index`` from a new tensor of the same values.

    It is returned, or memory is written that it may share: its own, or an input's of its dtype.
    """
    own, kind = storage_id(tensor(index)), tensor(index).dtype
    risky = {own} | {
        storage_id(found)
        for node in graph.find_nodes(op="placeholder")
        if (found := tensor(node)) is not None and found.dtype == kind
    }
    returned = {storage_id(tensor(node)) for node in graph.output_node().all_input_nodes}
    written = {storage_id(tensor(node)) for call in graph.nodes for node in written_by(call)}
    return own is None or own in returned or bool(risky & written)


def written_by(node: fx.Node) -> Iterator[fx.Node]:
    """What a node of a Dynamo graph writes in place, or may."""
    if node.op not in ("call_function", "call_method"):
        return
    if isinstance(node.target, torch._ops.HigherOrderOperator) or node.op == "call_module":
        yield from node.all_input_nodes
    yield from schema_writes(node)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = node.target in IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))
    targets = [node.args[0] if in_place and node.args else None, node.kwargs.get("out")]
    if node.kwargs.get("inplace") is True:
        targets += node.args[:1]
    yield from (one for one in targets if isinstance(one, fx.Node))


def use_ranges(gm: fx.GraphModule, chosen: Sequence[RangeInput], ctx: Context) -> None:
    """Make ``gm``, a copy of Dynamo's graph, take the rows from ``starts[k]`` on for the k-th of ``chosen``.

    Appends the input STARTS, CPU int64 [len(chosen)], to the graph and to ``ctx.extra_inputs``.
    """
    graph = gm.graph
    placeholders = graph.find_nodes(op="placeholder")
    uses = list(index_uses(graph))
    starts = add_input(gm, STARTS, STARTS, torch.zeros(len(chosen), dtype=torch.int64), ctx)
    place = starts.next  # all inputs come first
    for number, one in enumerate(chosen):
        index = placeholders[one.position]
        with graph.inserting_before(place):
            first = graph.call_function(operator.getitem, (starts, number))
            first.meta["example_value"] = infer(first, ctx.fake_mode)  # without, AOTAutograd caches nothing
            start = graph.call_method("item", (first,))
            length = graph.call_method("size", (index, 0))
            end = graph.call_function(operator.add, (start, length))
            check(graph, operator.ge, start, 0, f"{one.name} is annotated with rows below 0")
            found = tensor(index)
            if found.dtype == torch.int32:
                why = f"{one.name} is annotated with rows that int32 cannot hold"
                check(graph, operator.le, end, INT32_MOST, why)
            made = {"dtype": found.dtype, "device": found.device}
            rows = graph.call_function(torch.arange, (start, end), made)
        for use in (use for use in uses if use.index is index):
            with graph.inserting_before(use.node):
                size = graph.call_method("size", (use.base, use.dim))
                why = f"{one.name} is annotated with rows past the end of what it indexes"
                check(graph, operator.le, end, size, why)
        index.replace_all_uses_with(rows, delete_user_cb=lambda user, length=length: user is not length)
    graph.lint()
    gm.recompile()


def promised_starts(graph: fx.Graph) -> set[sympy.Symbol]:
    """The symbols of the first rows read from STARTS, the last input of an ATen graph of the ranges body."""
    starts = graph.find_nodes(op="placeholder")[-1]
    rows = [item for item in starts.users if item.target is torch.ops.aten.select.int]
    read = [value for row in rows for value in row.users]
    found = [node.meta["val"] for node in read if node.target is torch.ops.aten._local_scalar_dense.default]
    return {symbol for size in found for symbol in size.node.expr.free_symbols}


def check(graph: fx.Graph, relation: Callable[[Any, Any], Any], left: Any, right: Any, why: str) -> None:
    """A fact for the passes, asserted at run time: what Dynamo makes of ``torch._check``."""
    holds = graph.call_function(relation, (left, right))
    graph.call_function(torch.ops.aten._assert_scalar.default, (holds, why))
