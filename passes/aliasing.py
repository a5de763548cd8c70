"""Who shares memory with whom in a graph, who writes it, and whether a view may stand where a copy stood.

    y = index_select(x, 0, i)    a copy: what happens to x afterwards does not matter to y
    y = x[s:e]                   a view: it must stay inside, and x must keep still until y was last read

Two nodes share memory when their fake tensors share a storage or an op's schema says that its result
aliases an argument. Copies of the same dtype count as views here, since an inner compiler may drop them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from k3compile.passes.graph import (
    AUTO_FUNCTIONALIZED,
    arguments,
    positions,
    schema_writes,
    storage_id,
    tensor,
)
from torch import fx

aten, prims = torch.ops.aten, torch.ops.prims
COPIES = {
    aten.clone.default,
    aten._to_copy.default,
    aten._unsafe_view.default,
    aten.lift_fresh_copy.default,
    prims.convert_element_type.default,
    prims.device_put.default,
}
SCATTERS = {  # functional, but an inner compiler may do them in place of their first argument
    aten.index_copy.default,
    aten.index_put.default,
    aten._unsafe_index_put.default,
    aten.index_add.default,
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.as_strided_scatter.default,
    aten.scatter.src,
    aten.scatter_add.default,
    aten.copy.default,
}


class Aliases:
    """Storage, views and writers of one graph; build anew after changing it."""

    def __init__(self, graph: fx.Graph):
        self.order: dict[fx.Node, float] = dict(positions(graph))
        self.output = graph.output_node()
        self._writers: dict[int, list[fx.Node]] = {}
        for node in graph.nodes:
            self._note_writes(node)

    def replaced(self, old: fx.Node, new: fx.Node, place: fx.Node) -> None:
        """Keep up with ``new``, put where ``place`` stood, doing what ``old`` did; both may be gone."""
        self.order[new] = self.order[place]
        for result in new.users:
            self.order.setdefault(result, self.order[new])
        for writers in self._writers.values():
            if old in writers:
                writers.remove(old)
        self._note_writes(new)

    def _note_writes(self, node: fx.Node) -> None:
        for base in written_by(node):
            if (storage := storage_of(base)) is not None:
                self._writers.setdefault(storage, []).append(node)

    def before(self, earlier: fx.Node, later: fx.Node) -> bool:
        """Whether ``earlier`` stands before ``later``."""
        return self.order[earlier] < self.order[later]

    def writers(self, node: fx.Node) -> list[fx.Node]:
        """Nodes that write, or may be made to write, the storage of ``node``, in order."""
        return self._writers.get(storage_of(node), [])

    def family(self, node: fx.Node) -> set[fx.Node]:
        """``node`` and everything that would see through it: views and droppable copies, transitively."""
        found: set[fx.Node] = set()
        todo = [node]
        while todo:
            member = todo.pop()
            if member not in found:
                found.add(member)
                todo += [user for user in member.users if passes_through(user, member)]
        return found

    def last_read(self, family: set[fx.Node]) -> int:
        """Where the last user of the family stands."""
        return max((self.order[u] for member in family for u in member.users), default=-1)

    def view_objection(self, node: fx.Node, base: fx.Node) -> str | None:
        """Why a view of ``base`` cannot stand where ``node``, a copy of part of it, stands; None when it
        can."""
        family = self.family(node)
        if any(self.output in member.users for member in family):
            return "the view would reach an output of the graph"
        if any(opaque(user) for member in family for user in member.users):
            return "a consumer of unknown kind would take the view"
        if any(member in written_by(user) for member in family for user in member.users):
            return "a consumer would write through the view"
        last = self.last_read(family)
        for writer in self.writers(base):
            if self.order[writer] < self.order[node]:
                continue
            if any(member in writer.all_input_nodes for member in family):
                return "a consumer that takes the view writes the same storage"
            if self.order[writer] < last:
                return "the base is written before the view is last read"
        return None

    def other_writers(self, target: fx.Node, scattered: fx.Node) -> list[fx.Node]:
        """Nodes besides ``scattered`` that write the storage of ``target``, except with what comes of it.

        Whether an inner compiler may work in place hangs on who reads and writes that memory when; some judge
        it wrongly, so a rewrite must not change the question where there is one.
        """
        epilogue = aten.copy_.default
        others = [node for node in self.writers(target) if node is not scattered]
        return [n for n in others if n.target is not epilogue or not depends(n.args[1], scattered)]

    def fresh(self, node: fx.Node) -> bool:
        """Whether ``node`` is memory this graph made, and no view of anything else."""
        if node.op != "call_function" or any(passes_through(node, arg) for arg in node.all_input_nodes):
            return False
        if node.target is operator.getitem:  # a result of a functionalised op, or what it left in a base
            base = base_behind(node)
            return base is None or self.fresh(base)
        return all(self.fresh(base) for base in functional_bases(node))


def storage_of(node: fx.Node) -> int | None:
    """An identity of the memory behind a node's value, None when it has no tensor."""
    return storage_id(tensor(node))


def written_by(node: fx.Node) -> list[fx.Node]:
    """What ``node`` writes in place, or may be made to."""
    return [*schema_writes(node), *functional_bases(node)]


def functional_bases(node: fx.Node) -> Iterator[fx.Node]:
    """What a functionalised write would change, were it done in place."""
    if node.target in AUTO_FUNCTIONALIZED:
        bases = node.kwargs.get("_all_bases")
        yield from (b for b in (bases or node.all_input_nodes) if isinstance(b, fx.Node))
    elif isinstance(node.target, torch._ops.HigherOrderOperator):
        yield from node.all_input_nodes
    elif node.target in SCATTERS:
        yield from (a for a in node.args[:1] if isinstance(a, fx.Node))


def base_behind(result: fx.Node) -> fx.Node | None:
    """The base whose new content ``result`` is, for an item of a functionalised call; None for its own
    results."""
    call, place = result.args
    own = len(call.args[0]._schema.returns) if isinstance(call.args[0], torch._ops.OpOverload) else 0
    bases, place = list(functional_bases(call)), place - max(own, 1)
    return bases[place] if 0 <= place < len(bases) else None


def passes_through(user: fx.Node, member: fx.Node) -> bool:
    """Whether the result of ``user`` may share memory with its argument ``member``."""
    if user.target is operator.getitem:
        return member.target not in AUTO_FUNCTIONALIZED
    if user.op != "call_function" or not isinstance(user.target, torch._ops.OpOverload):
        return False
    if user.target in COPIES:
        before, after = tensor(member), tensor(user)
        return before is None or after is None or before.dtype == after.dtype
    named = arguments(user)
    for argument in user.target._schema.arguments:
        if argument.alias_info is not None:
            taken = named.get(argument.name)
            if member is taken or (isinstance(taken, (list, tuple)) and member in taken):
                return True
    return False


def opaque(user: fx.Node) -> bool:
    """Whether a consumer is of a kind whose reads and writes are not known here."""
    known = user.target is operator.getitem or user.target in AUTO_FUNCTIONALIZED
    return not known and user.op != "output" and not isinstance(user.target, torch._ops.OpOverload)


def depends(node: fx.Node, on: fx.Node) -> bool:
    """Whether ``node`` is computed from ``on``."""
    seen, todo = set(), [node]
    while todo:
        one = todo.pop()
        if one is on:
            return True
        if one not in seen:
            seen.add(one)
            todo += one.all_input_nodes
    return False
