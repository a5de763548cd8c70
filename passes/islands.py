"""Cut a functional graph into islands that a compiler which knows no state may have; the rest stays ours.

    %a = mm(%x, %w)                        %i = island_0(%x, %w, %b)      one call of the other compiler
    %b = silu(%a)                          %b = %i[0]
    %s = auto_functionalized(k3.op, %b) -> %s = auto_functionalized(k3.op, %b)
    %v = view(%b, ...)                     %v = view(%b, ...)             views are free: never an output

An island holds ``aten`` ops that are pure and of known sizes. It is convex (torch's partitioner sees to that)
and lies between two barriers, which are the nodes that may not be moved: writes, collectives, assertions. It
returns no view, so that what shares memory with what does not depend on the other compiler.
"""

from __future__ import annotations

import heapq
import operator
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from k3compile.passes.graph import AUTO_FUNCTIONALIZED, emit, op_name, removable, storage_id, tensor, value
from k3compile.passes.in_place import viewed
from k3compile.passes.remarks import PassResult, Remark
from k3compile.passes.runner import Context
from k3compile.passes.source import location
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import create_op_support
from torch.utils import _pytree as pytree

SMALLEST = 2  # ops that compute; for one alone the call costs more than it can win
TOO_SMALL = f"fewer than {SMALLEST} ops that compute"
Make = Callable[[str, fx.GraphModule, list[Any]], torch.nn.Module]
Group = list[fx.Node]


class IslandRefused(Exception):
    """The other compiler could not compile an island, which stays where it is; the text says why."""


@dataclass(frozen=True)
class Islands:
    """compiler: its name, for the report. make(name, graph, inputs): compile one island, whose graph returns
    a tuple; inputs are fake tensors and sizes. May raise IslandRefused.
    """

    compiler: str
    make: Make
    name: ClassVar[str] = "islands"
    level: ClassVar[str] = "aten"
    keeps: ClassVar[str] = "numeric"

    def run(self, gm: fx.GraphModule, ctx: Context) -> PassResult:
        """Replace each island by a call of what ``make`` made of it."""
        groups, small = partition(gm)
        remarks = []
        for group in groups:
            leave_views_outside(gm.graph, group)
        gather(gm.graph, groups)
        for group in groups:
            name = f"island_{len(remarks)}"
            remarks.append(self.settle(gm, name, group, ctx))
        remarks += not_taken(gm.graph, groups, small)
        return PassResult(any(r.kind == "applied" for r in remarks), tuple(remarks))

    def settle(self, gm: fx.GraphModule, name: str, group: Group, ctx: Context) -> Remark:
        """Compile one island and put the call in its place, or leave it."""
        sub, inputs, outputs = extract(group)
        words = description(group, inputs, outputs)
        source = location(group[0])

        def remark(kind: str, reason: str) -> Remark:
            return Remark("islands", kind, name, "island", reason, words, str(source) if source else None)

        if not ctx.may_rewrite(self.name):
            return remark("missed", "no fuel")
        try:
            made = self.make(name, sub, [value(node) for node in inputs])
        except IslandRefused as error:
            return remark("missed", str(error))
        call_island(gm, name, made, group, inputs, outputs)
        return remark("applied", f"compiled by {self.compiler}")


def objection(node: fx.Node) -> str | None:
    """Why a node cannot be part of an island, or None. The empty text: it is no candidate, only arithmetic
    on sizes or the like.
    """
    if node.op != "call_function" or (node.target is operator.getitem and tensor(node.args[0]) is None):
        source = node.args[0] if node.target is operator.getitem else None
        return objection(source) if isinstance(source, fx.Node) and source.op == "call_function" else ""
    name = op_name(node)
    if name.startswith("k3."):
        return "it is a k3 op"
    if name.startswith(("_c10d_functional.", "c10d.")):
        return "it is a collective"
    if not isinstance(node.target, torch._ops.OpOverload):
        functional = node.target in AUTO_FUNCTIONALIZED
        higher = isinstance(node.target, torch._ops.HigherOrderOperator)
        return "it writes state" if functional else "it is a higher-order op" if higher else ""
    if node.target._schema.is_mutable:
        return "it writes state"
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return "it draws random numbers"
    if node.meta.get("unbacked_bindings") or data_dependent(node):
        return "a size depends on data"
    values = [v for v in pytree.tree_leaves(value(node)) if v is not None]
    if not values or not all(isinstance(v, torch.Tensor) for v in values):
        return ""
    return None if node.target.namespace in ("aten", "prims") else "it is a custom op"


def data_dependent(node: fx.Node) -> bool:
    """Whether a size of the node's value or arguments is only known when the graph runs."""
    near = [value(node), *(value(n) for n in node.all_input_nodes)]
    leaves = [v for v in pytree.tree_leaves(near) if isinstance(v, (torch.Tensor, torch.SymInt))]
    return any(free_unbacked_symbols(v) for v in leaves)


def partition(gm: fx.GraphModule) -> tuple[list[Group], list[Group]]:
    """Islands in graph order, and those that are too small; nodes of each in graph order."""
    support = create_op_support(lambda modules, node: objection(node) is None)
    proposed = CapabilityBasedPartitioner(gm, support, allows_single_node_partition=True).propose_partitions()
    place, segment = {}, {}
    barriers = 0
    for i, node in enumerate(gm.graph.nodes):
        barriers += is_barrier(node)
        place[node], segment[node] = i, barriers
    groups = []
    for found in proposed:
        parts: dict[int, Group] = {}
        for node in sorted(found.nodes, key=place.__getitem__):
            parts.setdefault(segment[node], []).append(node)
        groups += parts.values()
    groups.sort(key=lambda group: place[group[0]])
    large = [g for g in groups if computing(g) >= SMALLEST]
    return large, [g for g in groups if computing(g) < SMALLEST]


def is_barrier(node: fx.Node) -> bool:
    """Whether nothing may move across a node: what it does is not all said by its arguments and its value."""
    return node.op in ("call_module", "call_method") or (node.op == "call_function" and not removable(node))


def computing(group: Group) -> int:
    """Nodes that are more than views."""
    return sum(viewed_node(node) is None and node.target is not operator.getitem for node in group)


def viewed_node(node: fx.Node) -> fx.Node | None:
    """The node whose memory ``node`` gives a view of; schemas do not tell it of ``_unsafe_view``."""
    if (parent := viewed(node)) is not None:
        return parent
    mine = storage_id(tensor(node))
    return next((n for n in node.all_input_nodes if mine is not None and storage_id(tensor(n)) == mine), None)


def leave_views_outside(graph: fx.Graph, group: Group) -> None:
    """Repeat outside each view that is read outside; ``group`` loses the views that nobody in it reads."""
    members = set(group)
    copies: dict[fx.Node, fx.Node] = {}

    def outside(node: fx.Node) -> fx.Node:
        source = node.args[0] if node.target is operator.getitem else viewed_node(node)
        if node not in members or not isinstance(source, fx.Node) or not free_outside(node):
            return node
        if node not in copies:
            args = fx.map_arg(node.args, lambda n: outside(n) if n is source else n)
            with graph.inserting_after(node):
                copies[node] = emit(
                    graph, node.target, args, node.kwargs, like=node, mode=None, known=value(node)
                )
        return copies[node]

    for node in group:
        read = any(u not in members and u not in copies.values() for u in node.users)
        if read and (copy := outside(node)) is not node:
            inside = members.union(copies.values())
            node.replace_all_uses_with(copy, delete_user_cb=lambda user, inside=inside: user not in inside)
    for node in reversed(group):
        if not node.users:
            group.remove(node)
            graph.erase_node(node)


def free_outside(node: fx.Node) -> bool:
    """Whether a node is a view, or a part of a view with several results."""
    parent = node.args[0] if node.target is operator.getitem else None
    return viewed_node(node) is not None or (isinstance(parent, fx.Node) and viewed_node(parent) is not None)


def gather(graph: fx.Graph, groups: list[Group]) -> None:
    """Move nodes between barriers so that each group stands together, everything else as it stood."""
    unit = {node: group[0] for group in groups for node in group}
    stretch: list[fx.Node] = []
    for node in list(graph.nodes):
        if node.op in ("placeholder", "output") or is_barrier(node):
            settle_stretch(stretch, unit)
            stretch = []
        else:
            stretch.append(node)


def settle_stretch(stretch: list[fx.Node], unit: dict[fx.Node, fx.Node]) -> None:
    """Order one stretch: units whose inputs are ready, the earliest first."""
    if not any(node in unit for node in stretch):
        return
    place = {node: i for i, node in enumerate(stretch)}
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in stretch:
        members.setdefault(unit.get(node, node), []).append(node)
    waits = {head: {unit.get(n, n) for m in ms for n in m.all_input_nodes if n in place} - {head}
             for head, ms in members.items()}  # fmt: skip
    readers: dict[fx.Node, list[fx.Node]] = {head: [] for head in members}
    for head, sources in waits.items():
        for source in sources:
            readers[source].append(head)
    ready = [(place[head], head) for head, sources in waits.items() if not sources]
    heapq.heapify(ready)
    last, done = stretch[0].prev, 0
    while ready:
        _, head = heapq.heappop(ready)
        for node in members[head]:
            last.append(node)
            last, done = node, done + 1
        for reader in readers[head]:
            waits[reader].discard(head)
            if not waits[reader]:
                heapq.heappush(ready, (place[reader], reader))
    assert done == len(stretch), "an island that is not convex"


def extract(group: Group) -> tuple[fx.GraphModule, Group, Group]:
    """The island as a graph of its own; the nodes that it reads, and those of its nodes that others read."""
    members, graph = set(group), fx.Graph()
    inputs = list(dict.fromkeys(n for node in group for n in node.all_input_nodes if n not in members))
    outputs = [node for node in group if any(user not in members for user in node.users)]
    new = {}
    for node in inputs:
        new[node] = graph.placeholder(node.name)
        new[node].meta = {"val": value(node), "example_value": value(node)}
    for node in group:
        new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[node] for node in outputs))
    return fx.GraphModule({}, graph), inputs, outputs


def call_island(
    gm: fx.GraphModule, name: str, made: torch.nn.Module, group: Group, inputs: Group, outputs: Group
) -> None:
    """Put a call of ``made`` where ``group`` stood."""
    gm.add_submodule(name, made)
    with gm.graph.inserting_before(group[0]):
        call = gm.graph.call_module(name, tuple(inputs))
        call.meta = {"val": tuple(value(node) for node in outputs)}
        for place, node in enumerate(outputs):
            part = emit(gm.graph, operator.getitem, (call, place), like=node, mode=None, known=value(node))
            node.replace_all_uses_with(part, delete_user_cb=lambda user: user not in group)
    for node in reversed(group):
        gm.graph.erase_node(node)


def description(group: Group, inputs: Group, outputs: Group) -> str:
    """``3 ops (mm x2, silu); inputs f32[4, 8], f32[8, 8]; outputs f32[4, 8]``"""
    return f"{ops_of(group)}; inputs {shapes(inputs)}; outputs {shapes(outputs)}"


def ops_of(group: Iterable[fx.Node]) -> str:
    counts = Counter(op_name(node).removeprefix("aten.") for node in group)
    spelled = ", ".join(f"{op} x{n}" if n > 1 else op for op, n in sorted(counts.items()))
    return f"{counts.total()} ops ({spelled})"


def shapes(nodes: Iterable[fx.Node]) -> str:
    def one(v: Any) -> str:
        if not isinstance(v, torch.Tensor):
            return str(v)
        return f"{str(v.dtype).removeprefix('torch.')}[{', '.join(map(str, v.shape))}]"

    return ", ".join(one(value(node)) for node in nodes)


def not_taken(graph: fx.Graph, groups: list[Group], small: list[Group]) -> list[Remark]:
    """One remark for each reason, over all nodes that it keeps out of islands."""
    alone = {node for group in small if computing(group) for node in group}
    why: dict[str, Group] = {}
    for node in graph.nodes:
        if node.target is operator.getitem or node.op != "call_function":
            continue
        reason = TOO_SMALL if node in alone else objection(node)
        if reason:
            why.setdefault(reason, []).append(node)
    return [
        Remark("islands", "missed", ns[0].name, "island", reason, ops_of(ns)) for reason, ns in why.items()
    ]
