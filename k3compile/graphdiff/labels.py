"""Names for what a node is and for what is above and below it: equal names, equal subgraphs.

    label   what the node is by itself: op, target, constants, dtype, shape, stride, device, alias
    up      its label and the up of each operand, in order          (Merkle hash from the inputs)
    down    its label and (place, down) of its users, sorted        (Merkle hash from the outputs)

Names are numbers given out in order by one dictionary for both graphs, so they are equal exactly when
the subtrees are, in every process. Symbols are named by the input they are first seen in; data-dependent ones
are all alike here and told apart when a pair is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..passes.expressions import canonical
from .graph import Graph

Interned = dict[Any, int]


def intern(table: Interned, word: Any) -> int:
    """The number of a word, a new one for a new word."""
    return table.setdefault(word, len(table))


class Labels:
    """Labels of one graph. ``slots``: input position -> its number, shared by the two graphs."""

    def __init__(self, graph: Graph, slots: Mapping[int, Any], table: Interned) -> None:
        self.graph = graph
        self.tokens = tokens_of_inputs(graph, slots)
        self.strict: list[int] = []
        self.loose: list[int] = []
        cache: dict[str, str] = {}

        def rename(symbol: str) -> str:
            return self.tokens.get(symbol) or f"?{symbol.rstrip('0123456789')}"

        def size(text: Any) -> Any:
            if not isinstance(text, str):
                return text
            if text not in cache:
                cache[text] = canonical(text, rename)
            return cache[text]

        for i, node in enumerate(graph.nodes):
            if node["op"] == "placeholder":
                what: Any = ("input", slots[i])
            else:
                what = (node["op"], node["target"], len(graph.operands[i]))
            worn = renamed(graph.skeletons[i], size)
            value = (value_key(node["value"], size), alias(graph, i))
            self.loose.append(intern(table, what))
            self.strict.append(intern(table, (what, worn, value)))


def renamed(skeleton: Any, size: Callable[[Any], Any]) -> Any:
    """A skeleton with the symbols in it renamed."""
    if len(skeleton) == 2 and skeleton[0] == "sym":
        return ("sym", size(skeleton[1][1]))
    if not any(isinstance(part, tuple) for part in skeleton):
        return skeleton
    return tuple(renamed(part, size) if isinstance(part, tuple) else part for part in skeleton)


def value_key(value: Any, size: Callable[[Any], Any]) -> Any:
    """A value as a hashable word without its storage number."""
    if isinstance(value, list):
        return tuple(value_key(v, size) for v in value)
    if isinstance(value, dict):
        if "shape" not in value:
            return tuple((k, size(v)) for k, v in value.items())
        return (
            value["dtype"], tuple(map(size, value["shape"])), tuple(map(size, value["stride"])),
            size(value["offset"]), value["device"],
        )  # fmt: skip
    return (type(value).__name__, repr(value))


def alias(graph: Graph, i: int) -> int | None:
    """The first operand whose memory the node's value sits in; None for memory of its own."""
    value = graph.nodes[i]["value"]
    mine = value.get("storage") if isinstance(value, dict) else None
    if mine is None:
        return None
    for place, operand in enumerate(graph.operands[i]):
        theirs = graph.nodes[operand]["value"]
        for one in theirs if isinstance(theirs, list) else [theirs]:
            if isinstance(one, dict) and one.get("storage") == mine:
                return place
    return None


def tokens_of_inputs(graph: Graph, slots: Mapping[int, Any]) -> dict[str, str]:
    """Each symbol named after the input it is first seen in and where."""
    found: dict[str, str] = {}
    for i in graph.inputs:
        value = graph.nodes[i]["value"]
        if isinstance(value, dict):
            sizes = [*value.get("shape", ()), *value.get("stride", ()), value.get("sym")]
            for place, text in enumerate(sizes):
                if isinstance(text, str) and text.isalnum():
                    found.setdefault(text, f"i{slots[i]}d{place}")
    return found


def upward(graph: Graph, labels: Sequence[int], table: Interned) -> list[int]:
    """The up of every node."""
    up: list[int] = []
    for label, operands in zip(labels, graph.operands):
        up.append(intern(table, (label, *[up[o] for o in operands])))
    return up


def downward(graph: Graph, labels: Sequence[int], table: Interned) -> list[int]:
    """The down of every node."""
    down = [0] * len(graph)
    for i in range(len(graph) - 1, -1, -1):
        down[i] = intern(table, (labels[i], "down", *sorted((p, down[u]) for p, u in graph.users[i])))
    return down


def refined(graphs: Sequence[Graph], labels: Sequence[Sequence[int]], rounds: int = 6) -> list[list[int]]:
    """Labels that also tell apart nodes by all that is around them: ups and downs on top of each other."""
    current = [list(one) for one in labels]
    count = 0
    for _ in range(rounds):
        table: Interned = {}
        current = [upward(g, one, table) for g, one in zip(graphs, current)]
        current = [downward(g, one, table) for g, one in zip(graphs, current)]
        found = len({c for one in current for c in one})
        if found == count:
            break
        count = found
    return current
