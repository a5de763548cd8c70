"""Finds, or builds, the node that holds a symbolic size where a pass needs it as an argument."""

from __future__ import annotations

import operator

import sympy
import torch
from k3compile.passes.graph import emit, positions, value
from k3compile.passes.prover import Size, expr
from torch import fx


class Sizes:
    """The size-valued nodes of a graph by their expression; remembers those it adds."""

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self._place: dict[fx.Node, float] = dict(positions(graph))
        self._holders: dict[sympy.Expr, list[fx.Node]] = {}
        for node in graph.nodes:
            if isinstance(found := value(node), torch.SymInt):
                self._holders.setdefault(expr(found), []).append(node)

    def at(self, size: Size, before: fx.Node) -> fx.Node | int | None:
        """An argument equal to ``size`` that is computed before ``before``; None when it cannot be built."""
        return self._at(sympy.expand(expr(size)), before)

    def _at(self, wanted: sympy.Expr, before: fx.Node) -> fx.Node | int | None:
        if wanted.is_Integer:
            return int(wanted)
        for node in self._holders.get(wanted, ()):
            if self._place[node] < self._place[before]:
                return node
        if not isinstance(wanted, (sympy.Add, sympy.Mul)):
            return None
        parts = [self._at(part, before) for part in sorted(wanted.args, key=str)]
        if any(part is None for part in parts):
            return None
        combine = operator.add if isinstance(wanted, sympy.Add) else operator.mul
        total = parts[0]
        for part in parts[1:]:
            with self.graph.inserting_before(before):
                total = emit(self.graph, combine, (total, part), like=before, mode=None)
            self._remember(total, before)
        return total

    def _remember(self, node: fx.Node, before: fx.Node) -> None:
        self._place[node] = self._place[before] - 0.5
        self._holders.setdefault(expr(value(node)), []).append(node)
