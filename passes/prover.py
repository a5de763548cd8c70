"""Proves facts about symbolic sizes: what the ShapeEnv knows, closed under linear arithmetic.

The ShapeEnv alone leaves ``u0 <= u2`` open when it was told ``u0 + u1 == u2``: it applies an assertion only
where it recurs literally. Guards, ranges and ``torch._check`` lines are the facts here; :mod:`linear` draws
conclusions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import sympy
import torch
from k3compile.passes.linear import Facts, Linear, constraints, linear
from k3compile.passes.remarks import How, Proof
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols, statically_known_true
from torch.utils._sympy.functions import Max, Min

Size = int | torch.SymInt


def expr(size: Size) -> sympy.Expr:
    """The sympy expression of an int or SymInt."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


class Prover:
    """The facts of one ShapeEnv, and what it learns later. None: only integers can be compared."""

    def __init__(self, shape_env: ShapeEnv | None):
        self.shape_env = shape_env
        self._forget()

    def _forget(self) -> None:
        self._facts: dict[How, Facts] = {"static": Facts(), "torch._check": Facts()}
        self._learnt: set[object] = set()
        self._proven: dict[sympy.Expr, How] = {}
        self._age: tuple[int, ...] = ()

    def le(self, left: Size, right: Size) -> bool:
        """Whether ``left <= right`` in every run."""
        return self._how(expr(left) - expr(right)) is not None

    def equal(self, left: Size, right: Size) -> bool:
        """Whether ``left == right`` in every run."""
        if self._simplified(expr(left) - expr(right)) == 0:
            return True
        return self.le(left, right) and self.le(right, left)

    def multiple(self, size: Size, of: int) -> bool:
        """Whether ``size`` is a multiple of ``of`` in every run."""
        return all(c % of == 0 for c in linear(self._simplified(expr(size))).values())

    def prove_le(self, obligation: str, left: Size, right: Size) -> Proof | None:
        """A proof of ``left <= right``, or None."""
        how = self._how(expr(left) - expr(right))
        return None if how is None else Proof(obligation, how, f"{expr(left)} <= {expr(right)}")

    def teach(self, left: Size, right: Size) -> None:
        """Tell the ShapeEnv ``left <= right``, which was proven, so that later shape rules need not clamp.

        Only for data-dependent sizes: the assertion follows from those already there, so no guard is added.
        """
        assert self.le(left, right), "only proven facts are taught"
        data_dependent = free_unbacked_symbols(expr(left) - expr(right))
        if data_dependent and not statically_known_true(left <= right):
            torch._check(left <= right)

    def holds(self, expression: str) -> bool:
        """Whether the text of a proof (``a <= b``) holds: what was reported is what is true."""
        left, right = expression.split(" <= ")
        symbols = () if self.shape_env is None else self.shape_env.var_to_range
        names = {str(s): s for s in symbols} | {"Min": Min, "Max": Max}
        return self._how(sympy.sympify(left, names) - sympy.sympify(right, names)) is not None

    def _how(self, at_most_zero: sympy.Expr) -> How | None:
        goal = self._simplified(at_most_zero)
        if goal.is_number:
            return "construction" if goal <= 0 else None
        assert self.shape_env is not None, "symbols need a ShapeEnv"
        self._refresh()
        if goal not in self._proven:
            how = next((how for how, facts in self._facts.items() if facts.imply(linear(goal))), None)
            if how is None:
                return None
            self._proven[goal] = how
        return self._proven[goal]

    def _simplified(self, e: sympy.Expr) -> sympy.Expr:
        return sympy.expand(self.shape_env.simplify(e) if self.shape_env is not None else e)

    def _refresh(self) -> None:
        """Learn what the ShapeEnv has been told since."""
        env = self.shape_env
        asserts = [a.expr for many in env.deferred_runtime_asserts.values() for a in many]
        age = (len(env.replacements), len(env.guards), len(asserts), len(env.var_to_range))
        if age == self._age:
            return
        if self._age[:1] != age[:1]:
            self._forget()  # symbols got other names
        self._age = age
        bounded = {s for a in asserts if len(a.free_symbols) == 1 for s in a.free_symbols}
        for fact in self._new(guard.expr for guard in env.guards):
            self._learn("static", constraints(env.simplify(fact)))
        for fact in self._new(asserts):
            self._learn("torch._check", constraints(env.simplify(fact)))
        for symbol, bounds in self._new(env.var_to_range.items()):
            known_as = env.simplify(symbol)
            how = "torch._check" if bounded & {symbol, *known_as.free_symbols} else "static"
            if isinstance(bounds.lower, sympy.Integer):
                self._learn(how, [linear(bounds.lower - known_as)])
            if isinstance(bounds.upper, sympy.Integer):
                self._learn(how, [linear(known_as - bounds.upper)])

    def _new(self, facts: Iterable[Any]) -> Iterator[Any]:
        for fact in facts:
            if fact not in self._learnt:
                self._learnt.add(fact)
                yield fact

    def _learn(self, how: How, rows: Iterable[Linear]) -> None:
        """Facts that need no assertion count among those that may rest on one."""
        for row in rows:
            self._facts["torch._check"].add(row)
            if how == "static":
                self._facts["static"].add(row)
