"""Linear arithmetic over integer unknowns: does a list of facts imply a claim?

    facts:  -u0 <= 0,  -u1 <= 0,  u0 + u1 - u2 == 0        claim:  u0 - u2 <= 0
    the claim negated is u2 - u0 + 1 <= 0; with the facts, eliminating u2, u1 and u0 leaves 1 <= 0: it follows

Terms that are not linear (products, floor divisions, minima) are opaque unknowns. That can lose a proof and
never invent one. Elimination is Fourier and Motzkin's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction

import sympy
from torch.utils._sympy.functions import Max, Min

Linear = dict[sympy.Expr | None, Fraction]  # coefficient by term, None the constant; means: the sum is <= 0
MAX_ROWS = 64  # elimination is exponential in the worst case; a layer has about ten rows
HUB = 12  # facts about one unknown beyond which it connects too much


def linear(at_most_zero: sympy.Expr) -> Linear:
    """Split a sum into coefficient by term."""
    terms = sympy.expand(at_most_zero).as_coefficients_dict()
    return {None if term == 1 else term: fraction(c) for term, c in terms.items() if c != 0}


def fraction(number: sympy.Number) -> Fraction:
    """A sympy number, exactly."""
    exact = sympy.Rational(number)
    return Fraction(int(exact.p), int(exact.q))


def constraints(fact: sympy.Basic) -> Iterator[Linear]:
    """A relation as sums that are at most zero; nothing for what is not a relation of numbers."""
    if isinstance(fact, sympy.And):
        for part in fact.args:
            yield from constraints(part)
        return
    if not isinstance(fact, sympy.core.relational.Relational):
        return
    difference = fact.lhs - fact.rhs
    step = 1 if difference.is_integer else 0  # a strict relation of integers leaves a gap of one
    if isinstance(fact, (sympy.Le, sympy.Eq)):
        yield linear(difference)
    if isinstance(fact, (sympy.Ge, sympy.Eq)):
        yield linear(-difference)
    if isinstance(fact, sympy.Lt):
        yield linear(difference + step)
    if isinstance(fact, sympy.Gt):
        yield linear(-difference + step)


class Facts:
    """Rows known to hold, found by the unknowns they speak of."""

    def __init__(self, rows: Iterable[Linear] = ()):
        self._about: dict[sympy.Expr, list[Linear]] = {}
        for row in rows:
            self.add(row)

    def add(self, row: Linear) -> None:
        """Learn one more fact."""
        for term in row.keys() - {None}:
            self._about.setdefault(term, []).append(row)

    def imply(self, claim: Linear) -> bool:
        """Whether the facts imply ``claim``, an integer inequality. False also means "could not tell".

        An unknown of very many facts, such as the token count of all layers, first leads to no further facts.
        """
        negated = {term: -c for term, c in claim.items()}
        negated[None] = negated.get(None, Fraction(0)) + 1
        few = self.connected(negated, hub=HUB)
        if contradictory(few):
            return True
        many = self.connected(negated, hub=MAX_ROWS)
        return len(few) < len(many) <= MAX_ROWS and contradictory(many)

    def connected(self, seed: Linear, hub: int) -> list[Linear]:
        """``seed`` and the facts that share an unknown with it, transitively, through all but hubs."""
        chosen, seen, todo = [seed], {id(seed)}, list(seed.keys() - {None})
        reached = set(todo)
        while todo and len(chosen) <= MAX_ROWS:
            unknown = todo.pop()
            about = [*self._about.get(unknown, ()), *bounds_of_extremum(unknown)]
            if len(about) > hub:
                continue
            for row in about:
                if id(row) not in seen:
                    seen.add(id(row))
                    chosen.append(row)
                    todo += row.keys() - {None} - reached
                    reached |= row.keys()
        return chosen


def contradictory(system: list[Linear]) -> bool:
    """Whether no numbers satisfy all rows: eliminate one unknown after the other."""
    unknowns = {term for row in system for term in row} - {None}
    while unknowns and len(system) <= MAX_ROWS:
        unknown = min(unknowns, key=lambda u: (products(u, system), str(u)))
        unknowns.discard(unknown)
        system = eliminate(unknown, system)
        if any(impossible(row) for row in system):
            return True
    return any(impossible(row) for row in system)


def bounds_of_extremum(term: sympy.Expr) -> Iterator[Linear]:
    """``Min(a, b) <= a`` and ``a <= Max(a, b)`` for an unknown that is one."""
    for part in getattr(term, "args", ()):
        if isinstance(term, (Min, sympy.Min)):
            yield linear(term - part)
        elif isinstance(term, (Max, sympy.Max)):
            yield linear(part - term)


def products(unknown: sympy.Expr, system: list[Linear]) -> int:
    """How many rows eliminating ``unknown`` would make."""
    above = sum(row.get(unknown, 0) > 0 for row in system)
    below = sum(row.get(unknown, 0) < 0 for row in system)
    return above * below


def eliminate(unknown: sympy.Expr, system: list[Linear]) -> list[Linear]:
    """The rows without ``unknown``, and each upper bound on it added to each lower bound."""
    rows = [row for row in system if unknown not in row]
    for above in (row for row in system if row.get(unknown, 0) > 0):
        for below in (row for row in system if row.get(unknown, 0) < 0):
            scale = -above[unknown] / below[unknown]
            total = {t: above.get(t, 0) + scale * below.get(t, 0) for t in above.keys() | below.keys()}
            total = {t: c for t, c in total.items() if c != 0}
            if total not in rows and (impossible(total) or total.keys() - {None}):
                rows.append(total)
    return rows


def impossible(row: Linear) -> bool:
    """Whether a row without unknowns says that a positive number is at most zero."""
    return not (row.keys() - {None}) and row.get(None, 0) > 0
