"""The last pass: decide for every k3 op what computes it, and drop collectives of a group of one.

    a pure op, under a compiler that fuses    opened: its meaning as ATen (opening.py)
    an op with an implementation that fits    that implementation, an overload with the same arguments (one
                                              that is coarser than the op only where the user names it)
    any other op                              its meaning, called as one opaque node

A choice is made here, once, and each is a remark. An implementation the user named is obeyed or the compile
raises. Passes match ``k3`` ops, so nothing may be opened before the last of them has run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from k3compile.kernels.groups import ranks_of
from k3compile.kernels.op import OPS, Op
from k3compile.passes.graph import emit, fake_mode_of, op_name, storage_id, tensor, value
from k3compile.passes.opening import CannotOpen, Table, open_node
from k3compile.passes.remarks import PassResult, Remark
from k3compile.passes.runner import Context
from k3compile.passes.source import location
from k3compile.passes.written_view import written_value
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2

IDENTITY_ON_ONE_RANK = ("sum", "avg", "min", "max", "product")
MEANING, OPEN = "meaning", "open"


class CannotObey(ValueError):
    """An implementation the user named cannot compute an op of this graph."""


@dataclass(frozen=True)
class Lower:
    """fuses: whether the inner compiler gains from opened ops. providers: op -> ``meaning``, ``open`` or an
    implementation's name. table: the decompositions of the inner compiler.
    """

    fuses: bool = False
    providers: Mapping[str, str] = field(default_factory=dict)
    table: Table = field(default_factory=dict)
    name: ClassVar[str] = "lower"
    level: ClassVar[str] = "aten"
    keeps: ClassVar[str] = "numeric"

    def run(self, gm: fx.GraphModule, ctx: Context) -> PassResult:
        """Lower every op of the graph. Raises CannotObey for a named provider with an objection."""
        remarks = [drop_lone_all_reduce(node, ctx) for node in all_reduces(gm.graph)]
        while open_sites := [n for n in gm.graph.nodes if op_of(n) and not n.meta.get("k3_lowered")]:
            for node in open_sites:  # an opened meaning may hold further ops
                remarks.append(self.settle(gm, node, op_of(node), ctx))
        return PassResult(any(r.kind == "applied" for r in remarks), tuple(remarks))

    def settle(self, gm: fx.GraphModule, node: fx.Node, op: Op, ctx: Context) -> Remark:
        """Decide one op and carry it out."""
        node.meta["k3_lowered"] = True
        wanted, objections = self.providers.get(op.name), objections_of(op, node)
        if objections.get(wanted):
            raise cannot_obey(op, wanted, node, objections[wanted])
        fitting = [p for p, why in objections.items() if why is None and not op.implementations[p].asked_for]
        detail = refused(objections)
        choice = wanted or (fitting[0] if fitting else OPEN if self.fuses else MEANING)
        if choice in op.implementations and ctx.may_rewrite(self.name):
            call_implementation(node, op, choice)
            note = op.implementations[choice].note
            said = f"computed by {choice}{f', {note}' if note else ''}"
            return remark(node, "applied", said, detail)
        if choice != OPEN:
            return remark(node, "note", "computed by its meaning", detail)
        refusal = self.open(gm, node, op, ctx, asked=wanted == OPEN)
        if refusal is None:
            return remark(node, "applied", "opened", detail)
        if wanted == OPEN:
            raise CannotObey(f"lower={{{op.name!r}: 'open'}} cannot be obeyed at {location(node)}: {refusal}")
        return remark(node, "note" if op.opaque or not op.pure else "missed", refusal, detail)

    def open(self, gm: fx.GraphModule, node: fx.Node, op: Op, ctx: Context, asked: bool) -> str | None:
        """Open one op; why not, or None."""
        if not op.pure:
            return "stays one call: it writes its arguments"
        if op.open_form is None or (op.opaque and not asked):
            return "stays one call: it looks at tensor values"
        if not ctx.may_rewrite(self.name):
            return "no fuel"
        try:
            open_node(gm, node, op.open_form, ctx.fake_mode or fake_mode_of(gm.graph), self.table)
        except CannotOpen as error:
            return str(error)
        return None


def cannot_obey(op: Op, wanted: str, node: fx.Node, why: str) -> CannotObey:
    return CannotObey(f"lower={{{op.name!r}: {wanted!r}}} cannot be obeyed at {location(node)}: {why}")


def refused(objections: Mapping[str, str | None]) -> str:
    """``a: why; b, c: why``, in the order of the first of each reason."""
    by_reason: dict[str, list[str]] = {}
    for provider, why in objections.items():
        if why:
            by_reason.setdefault(why, []).append(provider)
    return "; ".join(f"{', '.join(providers)}: {why}" for why, providers in by_reason.items())


def op_of(node: fx.Node) -> Op | None:
    """The k3 op a node calls, functionalised or not; None for other nodes."""
    target = node.args[0] if node.target is auto_functionalized_v2 else node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return None
    return OPS.get(target._opname) if target.namespace == "k3" else None


def objections_of(op: Op, node: fx.Node) -> dict[str, str | None]:
    """What each implementation says to the arguments of ``node``, in the order they were registered."""
    args = arguments_by_position(op, node)
    return {p: i.objection(*args) for p, i in op.implementations.items()}


def arguments_by_position(op: Op, node: fx.Node) -> list[Any]:
    """The fake values an implementation will be called with, written views as they lie."""
    named = dict(node.kwargs)
    schema = op.overload._schema.arguments
    if node.target is auto_functionalized_v2:
        named |= {name: written_value(node, name) for name in op.writes}
    else:
        named |= {a.name: given for a, given in zip(schema, node.args)}
    return [value(named.get(a.name, a.default_value)) for a in schema]


def call_implementation(node: fx.Node, op: Op, provider: str) -> None:
    """Let ``node`` call the overload ``provider`` of its op."""
    overload = getattr(getattr(torch.ops.k3, op.name), provider)
    functional = node.target is auto_functionalized_v2
    args = (overload, *node.args[1:]) if functional else node.args
    with node.graph.inserting_before(node):
        new = node.graph.call_function(node.target if functional else overload, args, dict(node.kwargs))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def all_reduces(graph: fx.Graph) -> list[fx.Node]:
    return graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.all_reduce.default)


def drop_lone_all_reduce(node: fx.Node, ctx: Context) -> Remark:
    """Replace all_reduce and its wait by their input where the group has one rank.

    The result is a tensor of its own, so it becomes a clone where its input is also an input or an output of
    the graph: no new alias may leave.
    """
    x, reduction, group = node.args
    ranks = ranks_of(group)
    if ranks != 1:
        reason = "no such process group" if ranks is None else f"its group has {ranks} ranks"
        return remark(node, "note", f"stays: {reason}", f"group {group}")
    waits = [u for u in node.users if u.target is torch.ops._c10d_functional.wait_tensor.default]
    if reduction not in IDENTITY_ON_ONE_RANK or len(waits) != len(node.users):
        return remark(
            node, "missed", f"{reduction} of one rank is not known to be the input", f"group {group}"
        )
    if not ctx.may_rewrite("lower"):
        return remark(node, "missed", "no fuel")
    said = remark(node, "applied", "a group of one: the sum is its input", f"group {group}", all_reduces=-1)
    result = x
    if leaves_graph(x):
        with node.graph.inserting_before(node):
            clone = torch.ops.aten.clone.default
            result = emit(node.graph, clone, (x,), like=node, mode=ctx.fake_mode or fake_mode_of(node.graph))
    for wait in waits:
        wait.replace_all_uses_with(result)
        node.graph.erase_node(wait)
    node.graph.erase_node(node)
    return said


def leaves_graph(node: fx.Node) -> bool:
    """Whether the memory of ``node`` is that of a graph input, or is returned as it is by another node."""
    (output,) = node.graph.find_nodes(op="output")
    outside = [*node.graph.find_nodes(op="placeholder"), *output.all_input_nodes]
    return storage_id(tensor(node)) in [storage_id(tensor(other)) for other in outside]


def remark(node: fx.Node, kind: str, reason: str, detail: str = "", **expected: int) -> Remark:
    source = location(node)
    where = str(source) if source else None
    return Remark("lower", kind, node.name, op_name(node), reason, detail, where, expected=expected)
