"""Proves facts about symbolic sizes: what the ShapeEnv knows, closed under linear arithmetic.

The ShapeEnv alone leaves ``u0 <= u2`` open when it was told ``u0 + u1 == u2``: it applies an assertion only
where it recurs literally. Guards, ranges and ``torch._check`` lines are the facts here; :mod:`linear` draws
conclusions.
"""

from __future__ import annotations

import sympy
import torch
from k3compile.passes.linear import Linear, constraints, follows, linear
from k3compile.passes.remarks import How, Proof
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols, statically_known_true
from torch.utils._sympy.functions import Max, Min

Size = int | torch.SymInt


def expr(size: Size) -> sympy.Expr:
    """The sympy expression of an int or SymInt."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


class Prover:
    """The facts of one ShapeEnv, read anew when it learns more. None: only integers can be compared."""

    def __init__(self, shape_env: ShapeEnv | None):
        self.shape_env = shape_env
        self._known: dict[str, list[Linear]] = {}
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
        for how in ("static", "torch._check"):
            if follows(linear(goal), self._known[how]):
                return how
        return None

    def _simplified(self, e: sympy.Expr) -> sympy.Expr:
        return sympy.expand(self.shape_env.simplify(e) if self.shape_env is not None else e)

    def _refresh(self) -> None:
        """Sort the facts into those that need no run-time assertion (static) and all of them."""
        env = self.shape_env
        asserts = [a.expr for many in env.deferred_runtime_asserts.values() for a in many]
        age = (len(env.guards), len(asserts), len(env.var_to_range))
        if age == self._age:
            return
        bounded = {s for a in asserts if len(a.free_symbols) == 1 for s in a.free_symbols}
        static = [fact for guard in env.guards for fact in constraints(guard.expr)]
        checked = [fact for a in asserts for fact in constraints(env.simplify(a))]
        for symbol in env.var_to_range:
            asserted = bounded & {symbol, *env.simplify(symbol).free_symbols}
            (checked if asserted else static).extend(self._range(symbol))
        self._known, self._age = {"static": static, "torch._check": static + checked}, age

    def _range(self, symbol: sympy.Symbol):
        bounds, value = self.shape_env.var_to_range[symbol], self.shape_env.simplify(symbol)
        if isinstance(bounds.lower, sympy.Integer):
            yield linear(bounds.lower - value)
        if isinstance(bounds.upper, sympy.Integer):
            yield linear(value - bounds.upper)
