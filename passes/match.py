"""Finds a pattern, written as a Python function over ATen calls, in a graph.

    def pattern(x, r):                     anchor: the last call; matching walks from it to the inputs
        return aten.relu.default(aten.add.Tensor(x, r))

Constants are compared, not wildcards: ``aten.sum.dim_IntList(x, [1])`` matches that dimension only. A
parameter of the pattern binds to any argument, node or constant, and to the same one wherever it recurs.
What did not match is told with the most that did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from k3compile.passes.graph import arguments, op_name
from torch import fx


@dataclass(frozen=True)
class Pattern:
    """A traced pattern. calls are in order, the last is the anchor; outputs are what a match replaces."""

    inputs: tuple[fx.Node, ...]
    calls: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    @classmethod
    def trace(cls, function: Callable[..., Any]) -> Pattern:
        """Trace ``function``. Raises ValueError when a result is not a call that its anchor needs."""
        graph = fx.Tracer().trace(function)
        (results,) = graph.output_node().args
        outputs = tuple(results) if isinstance(results, (list, tuple)) else (results,)
        calls = tuple(n for n in graph.nodes if n.op == "call_function")
        if not calls or not set(calls) <= ancestors(calls[-1]):
            raise ValueError(f"pattern {function.__name__}: every call must lead to the last one")
        return cls(tuple(n for n in graph.nodes if n.op == "placeholder"), calls, outputs)


@dataclass(frozen=True)
class Match:
    """What every node of the pattern stands for in the graph: nodes, or constants for its parameters."""

    pattern: Pattern
    bound: dict[fx.Node, Any]

    @property
    def outputs(self) -> list[fx.Node]:
        """The graph's nodes to be replaced."""
        return [self.bound[p] for p in self.pattern.outputs]

    def outside_user(self) -> tuple[fx.Node, fx.Node] | None:
        """An intermediate node somebody else reads, and who; None when the match stands alone."""
        inside = {self.bound[p] for p in self.pattern.calls}
        for p in self.pattern.calls:
            if p not in self.pattern.outputs:
                for user in self.bound[p].users:
                    if user not in inside:
                        return self.bound[p], user
        return None


@dataclass(frozen=True)
class NearMiss:
    """How many calls of the pattern were found, and what stopped the match."""

    matched: int
    node: fx.Node
    reason: str


def match_at(pattern: Pattern, node: fx.Node) -> Match | NearMiss:
    """Match with the anchor at ``node``."""
    walk = Walk()
    if walk.same(pattern.calls[-1], node):
        return Match(pattern, walk.bound)
    matched = sum(p.op == "call_function" for p in walk.bound)
    return NearMiss(matched, node, walk.reason)


class Walk:
    """One attempt: the bindings so far and the first reason to stop."""

    def __init__(self):
        self.bound: dict[fx.Node, Any] = {}
        self.reason = ""

    def same(self, wanted: Any, found: Any) -> bool:
        """Whether an argument of the pattern stands for an argument of the graph."""
        if isinstance(wanted, fx.Node):
            if wanted in self.bound:
                known = self.bound[wanted]
                return known is found or (equal(known, found) or self.stop(f"{wanted.name} is two things"))
            if wanted.op == "placeholder":
                self.bound[wanted] = found
                return True
            return self.same_call(wanted, found)
        if isinstance(wanted, (list, tuple)):
            if not isinstance(found, (list, tuple)) or len(wanted) != len(found):
                return self.stop(f"expected {wanted}, found {found}")
            return all(self.same(w, f) for w, f in zip(wanted, found))
        return equal(wanted, found) or self.stop(f"expected {wanted}, found {found}")

    def same_call(self, wanted: fx.Node, found: Any) -> bool:
        if not isinstance(found, fx.Node) or found.op != "call_function" or found.target != wanted.target:
            what = op_name(found) if isinstance(found, fx.Node) else repr(found)
            return self.stop(f"expected {op_name(wanted)}, found {what}")
        self.bound[wanted] = found
        ours, theirs = named(wanted), named(found)
        if ours.keys() != theirs.keys():
            return self.stop(f"{op_name(found)} has the arguments {sorted(theirs)}")
        return all(self.same(ours[key], theirs[key]) for key in ours)

    def stop(self, reason: str) -> bool:
        self.reason = self.reason or reason
        return False


def named(node: fx.Node) -> dict[Any, Any]:
    """Arguments by schema name with defaults, or by position where there is no schema."""
    if isinstance(node.target, torch._ops.OpOverload):
        return arguments(node)
    return {**dict(enumerate(node.args)), **node.kwargs}


def equal(one: Any, other: Any) -> bool:
    """Equal constants of one type; nodes only if they are the same node."""
    if isinstance(one, fx.Node) or isinstance(other, fx.Node):
        return one is other
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(equal(a, b) for a, b in zip(one, other))
    return type(one) is type(other) and one == other


def ancestors(node: fx.Node) -> set[fx.Node]:
    """``node`` and everything it is computed from."""
    found: set[fx.Node] = set()
    todo = [node]
    while todo:
        one = todo.pop()
        if one not in found:
            found.add(one)
            todo += one.all_input_nodes
    return found
