"""The difference between two graphs as a list of changes.

    before                      after                         diff(before, after).changes
    %s = index_select(x, i)     %v = slice(x, 0, 4)           rewritten  %s -> %v
    %y = relu(%s)               %y = relu(%v)

added, removed     a node without a partner
rewritten          what took the place of what (``group`` holds a replaced bit together), or another target,
                   constant or operand
meta               the same computation, another dtype, shape, stride, device or aliasing
moved              nodes that write memory, or read what is written, in another order
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

from ..passes.snapshot_text import shape_text
from .compare import ATTRIBUTES, Comparison
from .graph import Graph
from .islands import islands
from .match import Matching, match
from .replaced import Replaced

SCHEMA = "k3diff/1"
Kind = Literal["added", "removed", "rewritten", "moved", "meta"]


@dataclass(frozen=True)
class Change:
    """One difference. before and after: ids of nodes, None where there is none on that side (a change of the
    whole graph has neither). group: the number of the replaced bit that a rewritten node belongs to."""

    kind: Kind
    before: int | None
    after: int | None
    detail: str
    group: int | None = None


@dataclass(frozen=True)
class Diff:
    """Two snapshots, the ids of nodes that are each other, and what is different, in a stable order."""

    before: Mapping[str, Any]
    after: Mapping[str, Any]
    pairs: tuple[tuple[int, int], ...]
    changes: tuple[Change, ...]
    costs: Mapping[str, Any] | None = field(default=None)

    @property
    def same(self) -> bool:
        """Whether the graphs compute the same; names, order and source lines do not count."""
        return not self.changes

    def to_json(self) -> dict[str, Any]:
        """Plain data, schema ``k3diff/1``."""
        return {
            "schema": SCHEMA,
            "before": self.before,
            "after": self.after,
            "pairs": [list(pair) for pair in self.pairs],
            "changes": [asdict(change) for change in self.changes],
            "costs": self.costs,
        }


def diff(before: Mapping[str, Any], after: Mapping[str, Any], ignore: Iterable[str] = ()) -> Diff:
    """Compare two ``k3graph/1`` snapshots. ``ignore``: attributes not to look at, of ``compare.ATTRIBUTES``.

    Raises ValueError for another schema, a broken snapshot or an unknown attribute.
    """
    ignored = frozenset(ignore)
    if unknown := sorted(ignored - set(ATTRIBUTES)):
        close = get_close_matches(unknown[0], ATTRIBUTES, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"cannot ignore {unknown[0]!r}{hint}; attributes: {', '.join(ATTRIBUTES)}")
    found = match(Graph(before), Graph(after))
    comparison = Comparison(found, ignored)
    changes = [*ungrouped(found, comparison), *compared(found, comparison, Replaced(found))]
    changes += [Change("meta", None, None, text) for text in comparison.ranges()]
    if "order" not in ignored:
        changes += moved(found)
    ids = [n["id"] for n in found.before.nodes], [n["id"] for n in found.after.nodes]
    changes.sort(key=lambda c: place(c, found))
    pairs = tuple((ids[0][b], ids[1][a]) for b, a in enumerate(found.forward) if a is not None)
    return Diff(before, after, pairs, tuple(changes))


def place(change: Change, found: Matching) -> tuple:
    """Where a change stands in the list: in the order of the earlier graph, then the later one."""
    last = len(found.before)
    b = last if change.before is None else found.before.position[change.before]
    a = -1 if change.after is None else found.after.position[change.after]
    return (change.group is None, change.group or 0, b, a, change.kind, change.detail)


def ungrouped(found: Matching, comparison: Comparison) -> Iterator[Change]:
    """A change for every node without a partner."""
    replaced = Replaced(found)
    number = 0
    for left, right in islands(found):
        group = number if left and right else None
        number += bool(left and right)
        for b in left:
            node = found.before.nodes[b]
            new = replaced.new_of.get(b)
            other = new if new is not None and found.backward[new] is None and group is not None else None
            kind: Kind = "removed" if group is None else "rewritten"
            text = f"{node['target']} {shape_text(node['value'])}"
            if other is not None:
                text = f"{node['target']} -> {found.after.nodes[other]['target']}"
            elif new is not None:
                text += f", its readers now read {found.after.name(new)}"
            after = None if other is None else found.after.nodes[other]["id"]
            yield Change(kind, node["id"], after, text, group)
        heads = {replaced.new_of.get(b) for b in left} if group is not None else set()
        for a in right:
            if a in heads:
                continue
            node = found.after.nodes[a]
            text = f"{node['target']} {shape_text(node['value'])}"
            if (old := replaced.old_of.get(a)) is not None:
                text += f", read in the place of {found.before.name(old)}"
            yield Change("added" if group is None else "rewritten", None, node["id"], text, group)


def compared(found: Matching, comparison: Comparison, replaced: Replaced) -> Iterator[Change]:
    """A change for every pair that is not the same."""
    for b, a in enumerate(found.forward):
        if a is None:
            continue
        ids = found.before.nodes[b]["id"], found.after.nodes[a]["id"]
        texts = comparison.rewritten(b, a)
        if len(found.before.operands[b]) == len(found.after.operands[a]):
            texts += [
                f"operand {place}: {found.before.name(x)} -> {found.after.name(y)}"
                for place, x, y in comparison.operands(b, a)
                if not replaced.told(x, y)
            ]
        meta = comparison.meta(b, a)
        if texts:
            yield Change("rewritten", *ids, "; ".join([*texts, *meta]))
        elif meta:
            yield Change("meta", *ids, "; ".join(meta))


def moved(found: Matching) -> Iterator[Change]:
    """A change for every pair that has to follow other nodes than before."""
    order_b = found.before.order(b for b, a in enumerate(found.forward) if a is not None)
    order_a = found.after.order(a for a, b in enumerate(found.backward) if b is not None)
    for b, a in enumerate(found.forward):
        if a is None:
            continue
        old = {found.forward[o] for o in order_b.get(b, ())}
        new = order_a.get(a, frozenset())
        if old != new:
            names = [", ".join(found.after.name(o) for o in sorted(s)) or "nothing" for s in (old, new)]
            ids = found.before.nodes[b]["id"], found.after.nodes[a]["id"]
            yield Change("moved", *ids, f"followed {names[0]}, now follows {names[1]}")
