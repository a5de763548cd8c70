"""What anchors leave unmatched falls into islands: bits of one graph that stand for bits of the other.

    before:  x -> [a -> b] -> y          after:  x -> [c] -> y          one island: {a, b} and {c}

Bits belong together when they touch, or when the same reader reads them at the same place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .match import Matching

LARGEST = 16  # nodes of an island that networkx is asked about; its search is exponential
Island = tuple[list[int], list[int]]


def islands(found: Matching) -> list[Island]:
    """(positions before, positions after) of each, in order of the first node before, then after."""
    left, right = found.rest()
    parent: dict[tuple[int, int], tuple[int, int]] = {}

    def root(x: tuple[int, int]) -> tuple[int, int]:
        while parent.setdefault(x, x) != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    def join(x: tuple[int, int], y: tuple[int, int]) -> None:
        first, second = sorted((root(x), root(y)))
        parent[second] = first

    for side, graph, rest in ((0, found.before, left), (1, found.after, right)):
        free = set(rest)
        for i in rest:
            root((side, i))
            for operand in graph.operands[i]:
                if operand in free:
                    join((side, i), (side, operand))
    replaced_by_pass(found, join)
    for b in {u for x in left for _, u in found.before.users[x]}:
        a = found.forward[b]
        if a is not None:
            for x, y in zip(found.before.operands[b], found.after.operands[a]):
                if found.forward[x] is None and found.backward[y] is None:
                    join((0, x), (1, y))
    grouped: dict[tuple[int, int], Island] = {}
    for side, rest in ((0, left), (1, right)):
        for i in rest:
            grouped.setdefault(root((side, i)), ([], []))[side].append(i)
    return [grouped[key] for key in sorted(grouped)]


def replaced_by_pass(found: Matching, join: Any) -> None:
    """Join what a pass put in the place of what, where the later snapshot was told."""
    if found.after.data.get("previous") != found.before.data.get("moment", ""):
        return
    for a, node in enumerate(found.after.nodes):
        for old in node.get("replaces", ()):
            b = found.before.position.get(old)
            if b is not None and found.forward[b] is None and found.backward[a] is None:
                join((0, b), (1, a))


def match_islands(found: Matching, labels: tuple[Sequence[int], Sequence[int]]) -> None:
    """Pair inside islands: all of the smaller side where it is a part of the other, else like with like."""
    for left, right in islands(found):
        if not left or not right:
            continue
        for b, a in contained(found, labels, left, right):
            found.pair(b, a)
        greedy(found, labels, left, right)


def contained(
    found: Matching, labels: tuple[Sequence[int], Sequence[int]], left: list[int], right: list[int]
) -> list[tuple[int, int]]:
    """Pairs that put the smaller side wholly inside the other; none where it does not fit."""
    if max(len(left), len(right)) > LARGEST:
        return []
    words = Counter(labels[0][b] for b in left), Counter(labels[1][a] for a in right)
    small = 0 if len(left) <= len(right) else 1
    if words[small] - words[1 - small]:
        return []
    import networkx

    graphs = []
    for graph, label, rest in ((found.before, labels[0], left), (found.after, labels[1], right)):
        one = networkx.MultiDiGraph()
        one.add_nodes_from((i, {"label": label[i]}) for i in rest)
        kept = set(rest)
        one.add_edges_from((o, i, p) for i in rest for p, o in enumerate(graph.operands[i]) if o in kept)
        graphs.append(one)
    matcher = networkx.algorithms.isomorphism.MultiDiGraphMatcher(
        graphs[1 - small],
        graphs[small],
        node_match=lambda x, y: x["label"] == y["label"],
        edge_match=lambda x, y: set(y) <= set(x),
    )
    first = next(matcher.subgraph_monomorphisms_iter(), {})
    return sorted(
        (small_one, large) if small == 0 else (large, small_one) for large, small_one in first.items()
    )


def greedy(
    found: Matching, labels: tuple[Sequence[int], Sequence[int]], left: list[int], right: list[int]
) -> None:
    """Pair what has the same op and shape and comes from the same line; then the same op and line."""
    for exact in (True, False):

        def word(graph: Any, label: Sequence[int], i: int, exact: bool = exact) -> Any:
            node = graph.nodes[i]
            value = node["value"]
            shape = str(value.get("shape")) if exact and isinstance(value, dict) else ""
            return label[i], shape, node.get("source"), node.get("module")

        waiting: dict[Any, list[int]] = {}
        for a in reversed(right):
            if found.backward[a] is None:
                waiting.setdefault(word(found.after, labels[1], a), []).append(a)
        for b in left:
            candidates = waiting.get(word(found.before, labels[0], b)) if found.forward[b] is None else None
            if candidates:
                found.pair(b, candidates.pop())
