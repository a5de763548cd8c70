"""A local change to a graph, as a value: pattern, replacement, objection.

    FUSE = Rewrite("fuse", pattern, replacement, objection)      both functions have the same parameters

``where`` tells what makes a match a candidate at all; ``objection`` says why a candidate is refused, which
goes to the report. Every candidate ends in one remark. If none was applied, a note tells the closest
partial match.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from k3compile.passes.graph import emit, op_name, positions, tensor, value
from k3compile.passes.match import Match, NearMiss, Pattern, match_at
from k3compile.passes.prover import Size, expr
from k3compile.passes.remarks import PassResult, Proof, Remark
from k3compile.passes.runner import Context, Keeps, Level
from k3compile.passes.source import location
from k3compile.passes.static_check import alike
from torch import fx


@dataclass(frozen=True)
class Site:
    """A match as objections see it: what the pattern's parameters and its results are."""

    match: Match
    ctx: Context

    @property
    def anchor(self) -> fx.Node:
        """The graph's node for the last call of the pattern."""
        return self.match.bound[self.match.pattern.calls[-1]]

    def argument(self, name: str) -> Any:
        """The node or constant a parameter stands for."""
        return next(self.match.bound[p] for p in self.match.pattern.inputs if p.name == name)

    def value(self, name: str) -> Any:
        """Its fake tensor, symbolic size, or itself."""
        return value(self.argument(name))

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor parameter."""
        return self.value(name).dtype


@dataclass(frozen=True)
class Rewrite:
    """One local change; a pass by itself, or a member of a :class:`Group`."""

    name: str
    pattern: Callable[..., Any]
    replacement: Callable[..., Any]
    objection: Callable[[Site], str | None] = lambda site: None
    where: Callable[[Site], bool] = lambda site: True
    level: Level = "aten"
    keeps: Keeps = "exact"

    @cached_property
    def traced(self) -> Pattern:
        """The pattern as nodes."""
        return Pattern.trace(self.pattern)

    @cached_property
    def substitute(self) -> fx.Graph:
        """The replacement as nodes."""
        return fx.Tracer().trace(self.replacement)

    def run(self, gm: fx.GraphModule, ctx: Context) -> PassResult:
        """Rewrite every match in ``gm``."""
        return run_rewrites(self.name, [self], gm, ctx)


@dataclass(frozen=True)
class Group:
    """Several rewrites under one name, each run over the whole graph in order."""

    name: str
    rewrites: tuple[Rewrite, ...]
    level: Level = "aten"
    keeps: Keeps = field(default="exact")

    def run(self, gm: fx.GraphModule, ctx: Context) -> PassResult:
        """Rewrite every match of every member."""
        return run_rewrites(self.name, self.rewrites, gm, ctx)


def run_rewrites(name: str, rewrites: Sequence[Rewrite], gm: fx.GraphModule, ctx: Context) -> PassResult:
    """Apply each rewrite wherever it matches, in graph order."""
    remarks: list[Remark] = []
    for rewrite in rewrites:
        made, closest, gone = [], None, set()
        target = rewrite.traced.calls[-1].target
        for node in [n for n in gm.graph.nodes if n.op == "call_function" and n.target == target]:
            if node in gone:
                continue
            found = match_at(rewrite.traced, node)
            if isinstance(found, NearMiss):
                closest = found if closest is None or found.matched > closest.matched else closest
            elif rewrite.where(site := Site(found, ctx)):
                made.append(attempt(name, rewrite, site))
                if made[-1].kind == "applied":
                    gone |= {found.bound[p] for p in found.pattern.calls}
        if (
            closest is not None
            and not any(r.kind == "applied" for r in made)
            and len(rewrite.traced.calls) > 1
        ):
            made.append(partial(name, rewrite, closest))
        remarks += made
    return PassResult(any(r.kind == "applied" for r in remarks), tuple(remarks))


def attempt(name: str, rewrite: Rewrite, site: Site) -> Remark:
    """Apply one candidate or say why not."""
    node, op, source = site.anchor.name, op_name(site.anchor), location(site.anchor)
    where = str(source) if source else None
    objection = refusal(rewrite, site) or rewrite.objection(site)
    saved = None if objection else expected(rewrite, site)
    if objection is None:
        objection = apply(name, rewrite, site)
    if objection is not None:
        return Remark(name, "missed", node, op, objection, rewrite.name, where)
    proof = Proof("the results look the same", "construction", "sizes, strides, dtype and device")
    return Remark(name, "applied", node, op, rewrite.name, "", where, (proof,), expected=saved)


def expected(rewrite: Rewrite, site: Site) -> dict[str, int | str]:
    """What a match saves before fusion: calls, and what passed between them through memory."""
    pattern = site.match.pattern
    calls = [node for node in rewrite.substitute.nodes if node.op == "call_function"]
    launches = sum(node.target is not operator.getitem for node in calls) - len(pattern.calls)
    bytes_: Size = 0
    for p in pattern.calls:
        found = tensor(site.match.bound[p])
        reads = sum(user in pattern.calls for user in p.users)
        if found is not None and reads:
            written = p not in pattern.outputs
            bytes_ = bytes_ - found.numel() * found.element_size() * (reads + written)
    gone = len(pattern.calls) - len(pattern.outputs)
    return {"launches": launches, "bytes": str(expr(bytes_)), "allocations": -gone} if gone else {}


def refusal(rewrite: Rewrite, site: Site) -> str | None:
    """Objections that hold for every rewrite."""
    if (outside := site.match.outside_user()) is not None:
        return f"{op_name(outside[0])} {outside[0].name} has another user: {outside[1].name}"
    place = positions(site.anchor.graph)
    inside = {site.match.bound[p] for p in site.match.pattern.calls}
    for output in site.match.outputs:
        if any(place[user] < place[site.anchor] for user in output.users if user not in inside):
            return f"{output.name} is read before the pattern is complete"
    return None


def apply(name: str, rewrite: Rewrite, site: Site) -> str | None:
    """Put the replacement before the anchor and remove what it replaces; or say why that cannot be."""
    graph, mode = site.anchor.graph, site.ctx.fake_mode
    stands_for = {p.name: site.match.bound.get(p) for p in site.match.pattern.inputs}
    made: dict[fx.Node, Any] = {}
    new_nodes: list[fx.Node] = []
    results: tuple = ()
    for node in rewrite.substitute.nodes:
        args, kwargs = (fx.map_arg(a, made.__getitem__) for a in (node.args, node.kwargs))
        if node.op == "placeholder":
            made[node] = stands_for[node.name]
        elif node.op == "output":
            results = args[0] if isinstance(args[0], (list, tuple)) else (args[0],)
        else:
            with graph.inserting_before(site.anchor):
                made[node] = emit(graph, node.target, args, kwargs, like=site.anchor, mode=mode)
            new_nodes.append(made[node])
    outputs = site.match.outputs
    looks = all(alike(value(old), value(new), site.ctx.prover) for old, new in zip(outputs, results))
    if not looks or not site.ctx.may_rewrite(name):
        for node in reversed(new_nodes):
            graph.erase_node(node)
        return (
            "the replacement's results look different" if not looks else "stopped by fuel or by the bisector"
        )
    for old, new in zip(outputs, results):
        old.replace_all_uses_with(new)
    for p in reversed(site.match.pattern.calls):
        graph.erase_node(site.match.bound[p])
    return None


def partial(name: str, rewrite: Rewrite, closest: NearMiss) -> Remark:
    """The note about the most that matched."""
    source = location(closest.node)
    calls = len(rewrite.traced.calls)
    reason = f"closest match has {closest.matched} of {calls} calls: {closest.reason}"
    node, where = closest.node, str(source) if source else None
    return Remark(name, "note", node.name, op_name(node), reason, rewrite.name, where)
