"""What is different about two nodes that were matched: nothing is taken on trust from the matching.

    %add: target aten.mul.Tensor -> aten.add.Tensor; operand 1: %a -> %b; shape f32[s0, 64] -> f32[s0, 32]

Symbols are paired by the vote of the sizes in which they stand; storages by who shares memory with whom.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from ..passes.expressions import SYMBOL, Rename, canonical
from ..passes.snapshot_text import shape_text, spell
from .labels import alias
from .match import Matching

ATTRIBUTES = ("dtype", "shape", "stride", "offset", "device", "storage", "constants", "ranges", "order")


class Comparison:
    """Compares pairs of one matching. ``ignore``: some of ``ATTRIBUTES``."""

    def __init__(self, found: Matching, ignore: frozenset[str] = frozenset()) -> None:
        self.found, self.ignore = found, ignore
        self.before, self.after = found.before, found.after
        self.symbols = paired_symbols(found)
        known = self.before.data.get("symbols", {})
        self.unrenamed = all(self.symbols.get(name) == name for name in known)
        self.roots = roots_of(self.before), roots_of(self.after)
        self.names = [{n["id"]: g.name(i) for i, n in enumerate(g.nodes)} for g in (self.before, self.after)]

    def rewritten(self, b: int, a: int) -> list[str]:
        """Differences in what is computed, operands left out: target and constants."""
        old, new = self.before.nodes[b], self.after.nodes[a]
        found = []
        if (old["op"], old["target"]) != (new["op"], new["target"]) and old["op"] != "placeholder":
            found.append(f"target {old['target']} -> {new['target']}")
        for key, x, y in sides(old, new):
            counted = count_nodes(x) != count_nodes(y)
            if counted or ("constants" not in self.ignore and self.differ(x, y)):
                found.append(f"{key}: {spelled(x, self.names[0])} -> {spelled(y, self.names[1])}")
        return found

    def operands(self, b: int, a: int) -> list[tuple[int, int, int]]:
        """(place, position before, position after) of operands that are not each other's match."""
        pairs = enumerate(zip(self.before.operands[b], self.after.operands[a]))
        return [(place, x, y) for place, (x, y) in pairs if self.found.forward[x] != y]

    def meta(self, b: int, a: int) -> list[str]:
        """Differences in the value: dtype, shape, stride, offset, device, aliasing."""
        old, new = self.before.nodes[b]["value"], self.after.nodes[a]["value"]
        found = list(self.value(old, new)) if old != new or old else []
        if "storage" not in self.ignore:
            found += self.storage(b, a)
        return found

    def value(self, old: Any, new: Any) -> Iterator[str]:
        """Differences of two values, storages left out."""
        if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
            for number, (x, y) in enumerate(zip(old, new)):
                yield from (f"[{number}] {text}" for text in self.value(x, y))
        elif not (is_tensor(old) and is_tensor(new)):
            if self.differ(old, new):
                yield f"value {shape_text(old)} -> {shape_text(new)}"
        else:
            changed = {k for k in ("dtype", "device") if k not in self.ignore and old[k] != new[k]}
            keys = ("shape", "stride", "offset")
            changed |= {k for k in keys if k not in self.ignore and self.differ(old[k], new[k], True)}
            if what := " and ".join(k for k in ("dtype", "shape") if k in changed):
                yield f"{what} {shape_text(old)} -> {shape_text(new)}"
            if "stride" in changed and "shape" not in changed:
                yield f"stride {plain(old['stride'])} -> {plain(new['stride'])}"
            yield from (f"{k} {old[k]} -> {new[k]}" for k in ("offset", "device") if k in changed)

    def storage(self, b: int, a: int) -> list[str]:
        """Whether the memory is shared with the same others."""
        old, new = alias(self.before, b), alias(self.after, a)
        if old != new:
            count = len(self.before.operands[b]) == len(self.after.operands[a])
            said = [self.memory(g, i, p) for g, i, p in ((self.before, b, old), (self.after, a, new))]
            return [f"storage {said[0]} -> {said[1]}"] if count or said[0] != said[1] else []
        others = {self.found.forward[o] for o in self.roots[0].get(b, ())} - {None}
        now = {o for o in self.roots[1].get(a, ()) if self.found.backward[o] is not None}
        if others == now:
            return []
        names = [", ".join(self.after.name(o) for o in sorted(s)) or "nothing" for s in (others, now)]
        return [f"storage shared with {names[0]} -> {names[1]}"]

    def memory(self, graph: Any, i: int, place: int | None) -> str:
        return "its own" if place is None else f"that of {graph.name(graph.operands[i][place])}"

    def constant(self, value: Any, rename: Rename, sizes: bool = False) -> Any:
        """A value with nodes left out and symbols renamed; ``sizes``: strings in it are sizes."""
        if isinstance(value, dict):
            if len(value) == 1 and "node" in value:
                return "node"
            inside = sizes or (len(value) == 1 and "sym" in value)
            return ("dict", *((k, self.constant(v, rename, inside)) for k, v in value.items()))
        if isinstance(value, (list, tuple)):
            return ("list", *(self.constant(v, rename, sizes) for v in value))
        if sizes and isinstance(value, str):
            return canonical(value, rename)
        return (type(value).__name__, repr(value))

    def differ(self, old: Any, new: Any, sizes: bool = False) -> bool:
        """Whether two arguments or sizes differ, symbols taken for each other as they are paired."""
        if sizes and self.unrenamed and old == new:
            return False
        return self.constant(old, self.before_symbol, sizes) != self.constant(new, str, sizes)

    def before_symbol(self, name: str) -> str:
        """The later graph's name of a symbol; one that has none keeps a name that matches nothing."""
        return self.symbols.get(name, f"gone.{name}" if name in self.before.data.get("symbols", {}) else name)

    def ranges(self) -> list[str]:
        """Symbols of which the two graphs know different bounds."""
        known = self.before.data.get("symbols", {}), self.after.data.get("symbols", {})
        if "ranges" in self.ignore:
            return []
        return [
            f"symbol {old}: {bounds(known[0][old])} -> {bounds(known[1][new])}"
            for old, new in sorted(self.symbols.items())
            if old in known[0] and new in known[1] and known[0][old] != known[1][new]
        ]


ABSENT = object()


def sides(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Arguments of two nodes side by side, with what to call each."""
    for i in range(max(len(old["args"]), len(new["args"]))):
        yield f"argument {i}", *(n["args"][i] if i < len(n["args"]) else ABSENT for n in (old, new))
    for key in sorted(old["kwargs"].keys() | new["kwargs"].keys()):
        yield key, old["kwargs"].get(key, ABSENT), new["kwargs"].get(key, ABSENT)


def count_nodes(value: Any) -> int:
    """Nodes in an argument."""
    if isinstance(value, dict):
        return 1 if len(value) == 1 and "node" in value else sum(map(count_nodes, value.values()))
    return sum(map(count_nodes, value)) if isinstance(value, list) else 0


def spelled(value: Any, names: Mapping[int, str]) -> str:
    return "nothing" if value is ABSENT else spell(value, names)


def is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and "shape" in value


def plain(sizes: list[Any]) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def bounds(known: Mapping[str, Any]) -> str:
    low, high = known.get("min"), known.get("max")
    return f"[{'-inf' if low is None else low}, {'inf' if high is None else high}]"


def paired_symbols(found: Matching) -> dict[str, str]:
    """Symbols before -> symbols after: those that most often stand in the same place, one to one."""
    votes: Counter[tuple[str, str]] = Counter()
    for b, a in enumerate(found.forward):
        if a is not None:
            vote(found.before.nodes[b]["value"], found.after.nodes[a]["value"], votes)
            vote(found.before.nodes[b]["args"], found.after.nodes[a]["args"], votes)
    known = [graph.data.get("symbols", {}) for graph in (found.before, found.after)]
    names: dict[str, str] = {}
    taken: set[str] = set()
    for (old, new), _ in sorted(votes.items(), key=lambda item: (-item[1], item[0])):
        if old in known[0] and new in known[1] and old not in names and new not in taken:
            names[old] = new
            taken.add(new)
    return names


def vote(old: Any, new: Any, votes: Counter[tuple[str, str]]) -> None:
    """Count the places where symbols stand; inside of longer expressions they weigh less."""
    if isinstance(old, str) and isinstance(new, str):
        if old == new and not SYMBOL.search(old):
            return
        names = [list(dict.fromkeys(SYMBOL.findall(text))) for text in (old, new)]
        if len(names[0]) == len(names[1]):
            for pair in zip(*names):
                votes[pair] += 1 if len(names[0]) > 1 else 1000
    elif isinstance(old, list) and isinstance(new, list):
        for x, y in zip(old, new):
            vote(x, y, votes)
    elif isinstance(old, dict) and isinstance(new, Mapping):
        for key in old.keys() & new.keys():
            vote(old[key], new[key], votes)


def roots_of(graph: Any) -> dict[int, frozenset[int]]:
    """Nodes that share memory without reading each other: node -> the others."""
    sharing: defaultdict[int, list[int]] = defaultdict(list)
    for i, node in enumerate(graph.nodes):
        value = node["value"]
        mine = value.get("storage") if isinstance(value, dict) else None
        if mine is not None and alias(graph, i) is None:
            sharing[mine].append(i)
    return {i: frozenset(group) - {i} for group in sharing.values() if len(group) > 1 for i in group}
