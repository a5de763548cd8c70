"""Which node all readers of a node read instead, so that one change tells what many readers would repeat.

before:  y = f(s); z = g(s)      after:  y = f(v); z = g(v)      one change: v is read in the place of s
"""

from __future__ import annotations

from collections import defaultdict

from .match import Matching


class Replaced:
    """``new_of``: position before -> position after; ``old_of``: the other way.

    Only where one of the two nodes has no partner (it is a change of its own), and where all readers agree.
    """

    def __init__(self, found: Matching) -> None:
        new: defaultdict[int, set[int]] = defaultdict(set)
        old: defaultdict[int, set[int]] = defaultdict(set)
        for b, a in enumerate(found.forward):
            if a is None or len(found.before.operands[b]) != len(found.after.operands[a]):
                continue
            for x, y in zip(found.before.operands[b], found.after.operands[a]):
                if found.forward[x] is None:
                    new[x].add(y)
                if found.backward[y] is None:
                    old[y].add(x)
        self.new_of = {x: next(iter(ys)) for x, ys in new.items() if len(ys) == 1}
        self.old_of = {y: next(iter(xs)) for y, xs in old.items() if len(xs) == 1}

    def told(self, x: int, y: int) -> bool:
        """Whether a change of x or of y already says that y is read in the place of x."""
        return self.new_of.get(x) == y or self.old_of.get(y) == x
