"""Which node of one graph is which of the other.

    inputs by position, output to output
    kept by the pass that ran between them     where a snapshot says so ("was")
    equal both ways, equal above, equal below  (labels.py), each followed by the neighbours of what is matched
    the same without values and constants      for graphs in another dtype or of another size
    descended from                             between levels, by the provenance that torch keeps ("from")
    islands                                    networkx, then op + shape + source inside an island

A wrong guess here makes a diff longer, never wrong: every pair is compared afterwards (compare.py).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

from .graph import Graph
from .islands import match_islands
from .labels import Interned, Labels, downward, intern, refined, upward, value_key

Key = Sequence[int]


class Matching:
    """The pairs found so far, both ways, by position."""

    def __init__(self, before: Graph, after: Graph) -> None:
        self.before, self.after = before, after
        self.forward: list[int | None] = [None] * len(before)
        self.backward: list[int | None] = [None] * len(after)
        self.fresh: deque[tuple[int, int]] = deque()

    def pair(self, b: int, a: int) -> bool:
        """Match two nodes; False where one already is."""
        if self.forward[b] is not None or self.backward[a] is not None:
            return False
        self.forward[b], self.backward[a] = a, b
        self.fresh.append((b, a))
        return True

    def spread(self, key_b: Key, key_a: Key) -> None:
        """Match neighbours of new pairs: operands at the same place, readers where only one can be meant."""
        while self.fresh:
            b, a = self.fresh.popleft()
            for x, y in zip(self.before.operands[b], self.after.operands[a]):
                if key_b[x] == key_a[y] and self.forward[x] is None and self.backward[y] is None:
                    self.pair(x, y)
            left = [(p, key_b[u], u) for p, u in self.before.users[b] if self.forward[u] is None]
            right = [(p, key_a[u], u) for p, u in self.after.users[a] if self.backward[u] is None]
            if left and right:
                for x, y in single(left, right):
                    self.pair(x, y)

    def rest(self) -> tuple[list[int], list[int]]:
        """What is not matched, on each side."""
        return (
            [b for b, a in enumerate(self.forward) if a is None],
            [a for a, b in enumerate(self.backward) if b is None],
        )


def match(before: Graph, after: Graph) -> Matching:
    """Match as many nodes as can be told to be the same."""
    found = Matching(before, after)
    slots_b, slots_a = align_inputs(before, after)
    table: Interned = {}
    labels = Labels(before, slots_b, table), Labels(after, slots_a, table)
    input_of = {slot: a for a, slot in slots_a.items()}
    for b, slot in slots_b.items():
        if slot in input_of:
            found.pair(b, input_of[slot])
    for b, a in zip(before.outputs, after.outputs):
        found.pair(b, a)
    kept_by_pass(found)
    by_hash(found, (labels[0].strict, labels[1].strict))
    by_hash(found, (labels[0].loose, labels[1].loose))
    across_levels(found)
    same_place(found)
    match_islands(found, (labels[0].loose, labels[1].loose))
    return found


def align_inputs(before: Graph, after: Graph) -> tuple[dict[int, int], dict[int, Any]]:
    """Slots of the inputs: those with the same slot are the same one. By position where the counts are equal,
    else by the longest run of like values, so that inputs that a pass added stay without a partner."""
    if len(before.inputs) == len(after.inputs):
        return {b: i for i, b in enumerate(before.inputs)}, {a: i for i, a in enumerate(after.inputs)}
    words = [[kind_of_input(g, i) for i in g.inputs] for g in (before, after)]
    shortest = min(map(len, words))
    head = next((i for i in range(shortest) if words[0][i] != words[1][i]), shortest)
    room = shortest - head
    tail = next((i for i in range(room) if words[0][-1 - i] != words[1][-1 - i]), room)
    slots_b = {b: i for i, b in enumerate(before.inputs)}
    slots_a: dict[int, Any] = {a: ("new", i) for i, a in enumerate(after.inputs)}
    same = [(i, i) for i in range(head)]
    same += [(len(words[0]) - 1 - i, len(words[1]) - 1 - i) for i in range(tail)]
    middle = [one[head : len(one) - tail] for one in words]
    if 0 < len(middle[0]) * len(middle[1]) <= 40_000:
        for block in SequenceMatcher(None, *middle, autojunk=False).get_matching_blocks():
            same += [(head + block.a + i, head + block.b + i) for i in range(block.size)]
    for b, a in same:
        slots_a[after.inputs[a]] = b
    return slots_b, slots_a


def kind_of_input(graph: Graph, i: int) -> Any:
    """What an input is like: its value without names of symbols, and who reads it."""
    value = value_key(graph.nodes[i]["value"], lambda size: "?" if isinstance(size, str) else size)
    return value, tuple(sorted({(p, graph.nodes[u]["target"]) for p, u in graph.users[i]}))


def kept_by_pass(found: Matching) -> None:
    """Pair what a pass left alone, where the later snapshot was taken of the same graph objects."""
    if found.after.data.get("previous") != found.before.data.get("moment", ""):
        return
    for a, node in enumerate(found.after.nodes):
        b = found.before.position.get(node.get("was"))
        if b is not None and found.before.nodes[b]["op"] == node["op"]:
            found.pair(b, a)


def across_levels(found: Matching) -> None:
    """Pair a node with the last of those that say they come from it, between graphs of different levels."""
    if found.before.data.get("level") == found.after.data.get("level"):
        return
    names = {node["name"]: b for b, node in enumerate(found.before.nodes)}
    for a in range(len(found.after) - 1, -1, -1):
        origins = [names[name] for name in found.after.nodes[a].get("from") or () if name in names]
        if origins:
            found.pair(origins[-1], a)


def by_hash(found: Matching, labels: tuple[Key, Key]) -> None:
    """Pair nodes that are equal both ways, then above, then below; the most certain ones first."""
    graphs = found.before, found.after
    if not all(found.rest()):
        return
    table: Interned = {}
    up = [upward(g, one, table) for g, one in zip(graphs, labels)]
    down = [downward(g, one, table) for g, one in zip(graphs, labels)]
    both = [[intern(table, (u, d, "both")) for u, d in zip(*pair)] for pair in zip(up, down)]
    if Counter(both[0]) == Counter(both[1]) and len(set(both[0])) < len(both[0]):
        both = refined(graphs, both)
    unique(found, *both)
    twins(found, both, both)
    unique(found, *up)
    unique(found, *down)
    found.fresh.extend((b, a) for b, a in enumerate(found.forward) if a is not None)
    found.spread(*labels)
    twins(found, up, labels)
    twins(found, down, labels)


def unique(found: Matching, key_b: Key, key_a: Key) -> None:
    """Pair nodes whose key nobody else has among what is left."""
    left, right = found.rest()
    for b, a in single([(key_b[b], b) for b in left], [(key_a[a], a) for a in right]):
        found.pair(b, a)


def twins(found: Matching, keys: Sequence[Key], near: Sequence[Key]) -> None:
    """Pair nodes that share their key, from the outputs up, taking along the neighbours of each pair."""
    found.spread(*near)
    waiting: dict[int, list[int]] = {}
    for a in found.rest()[1]:
        waiting.setdefault(keys[1][a], []).append(a)
    for b in range(len(found.before) - 1, -1, -1):
        candidates = waiting.get(keys[0][b]) if found.forward[b] is None else None
        while candidates and found.backward[candidates[-1]] is not None:
            candidates.pop()
        if candidates:
            found.pair(b, candidates.pop())
            found.spread(*near)


def single(left: list[tuple], right: list[tuple]) -> list[tuple[int, int]]:
    """Pairs of last entries whose other entries occur once on either side."""
    seen_left = Counter(word[:-1] for word in left)
    seen_right = Counter(word[:-1] for word in right)
    place = {word[:-1]: word[-1] for word in right}
    return [
        (word[-1], place[word[:-1]]) for word in left if seen_left[word[:-1]] == 1 == seen_right[word[:-1]]
    ]


def same_place(found: Matching) -> None:
    """Pair an op that took another's place: the same operands, read at the same place of the same node."""
    for b in range(len(found.before) - 1, -1, -1):
        a = found.forward[b]
        if a is None:
            continue
        for x, y in zip(found.before.operands[b], found.after.operands[a]):
            if found.forward[x] is None and found.backward[y] is None:
                mapped = [found.forward[o] for o in found.before.operands[x]]
                if mapped and mapped == list(found.after.operands[y]):
                    found.pair(x, y)
