"""A snapshot made ready for comparing: positions for ids, operands in order, users, what must stay in order.

nodes[i]["args"]  ->  operands[i] = (3, 5)      positions of the nodes it reads, as they stand there
                      skeletons[i]              the arguments with a mark where each node stood
                      users[3] = [(0, i), ...]  operand number, reader
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

SCHEMA = "k3graph/1"
KEYS = ("id", "name", "op", "target", "args", "kwargs", "value")
WHOLE = ("level", "symbols", "edges")
MARK = ("node",)
REDUCES = "k3.latent_tail"  # its last argument names a group; none: no reduce
COLLECTIVES = ("_c10d_functional.", "_c10d_functional_autograd.", "c10d_functional.", "c10d.", "distributed.")


class Graph:
    """One snapshot. Raises ValueError for what is no ``k3graph/1`` snapshot."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        check(data)
        self.data = data
        self.nodes: list[Mapping[str, Any]] = data["nodes"]
        self.position = {node["id"]: i for i, node in enumerate(self.nodes)}
        self.operands: list[tuple[int, ...]] = []
        self.skeletons: list[Any] = []
        self.users: list[list[tuple[int, int]]] = [[] for _ in self.nodes]
        for i, node in enumerate(self.nodes):
            read: list[int] = []
            self.skeletons.append((skeleton(node["args"], read), skeleton(node["kwargs"], read)))
            try:
                operands = tuple(self.position[r] for r in read)
            except KeyError as error:
                raise ValueError(
                    f"%{node['name']} reads node {error}, which the snapshot does not have"
                ) from None
            if any(o >= i for o in operands):
                raise ValueError(f"%{node['name']} reads a node that comes after it")
            self.operands.append(operands)
            for place, operand in enumerate(operands):
                self.users[operand].append((place, i))
        self.inputs = [i for i, node in enumerate(self.nodes) if node["op"] == "placeholder"]
        self.outputs = [i for i, node in enumerate(self.nodes) if node["op"] == "output"]

    def __len__(self) -> int:
        return len(self.nodes)

    def name(self, i: int) -> str:
        """``%mm``"""
        return f"%{self.nodes[i]['name']}"

    def written(self, i: int) -> list[int]:
        """Positions of the arguments that a node changes in place."""
        node = self.nodes[i]
        if "writes" in node:
            return [self.position[w] for w in node["writes"] if w in self.position]
        last = node["target"].split(".")
        in_place = any(part.endswith("_") and not part.endswith("__") for part in last)
        return list(self.operands[i][:1]) if in_place and node["op"].startswith("call_") else []

    def order(self, among: Iterable[int]) -> dict[int, frozenset[int]]:
        """For each node that order matters to, those of ``among`` it has to follow beyond what it reads.

        A node that touches memory follows the last write to it; a write follows the readers since; a random
        draw follows the last one, and so does a collective: ranks that meet them in different orders wait
        for each other for ever. Nodes outside of ``among`` are passed over.
        """
        chosen = set(among)
        last: dict[Any, int] = {}
        since: dict[Any, list[int]] = {}
        writes = {i: self.memory(self.written(i)) | self.effects(i) for i in range(len(self.nodes))}
        changing = set().union(*writes.values())
        found: dict[int, frozenset[int]] = {}
        for i in range(len(self.nodes)):
            read = set() if self.is_view(i) else self.memory(self.operands[i])
            touched = (read | writes[i]) & changing
            if not touched or i not in chosen:
                continue
            after: set[int] = set()
            for key in touched:
                after |= {last[key]} if key in last else set()
                if key in writes[i]:
                    after |= set(since.pop(key, ()))
                    last[key] = i
                else:
                    since.setdefault(key, []).append(i)
            found[i] = frozenset(after - {i})
        return found

    def is_view(self, i: int) -> bool:
        """Whether a node's value is a look at an operand's memory: it reads nothing."""
        mine = set(storages(self.nodes[i]["value"], i)) if self.nodes[i]["op"] != "output" else set()
        return bool(mine) and mine <= self.memory(self.operands[i])

    def memory(self, positions: Iterable[int]) -> set[Any]:
        """The storages of some nodes; a node without a value stands for its own."""
        return {key for p in positions for key in storages(self.nodes[p]["value"], p)}

    def effects(self, i: int) -> set[Any]:
        """What a node changes besides memory: the random state, and what the other ranks wait for."""
        drawn = {"rng"} if "rng" in self.nodes[i].get("writes", ()) else set()
        return drawn | ({"ranks"} if is_collective(self.nodes[i]) else set())


def is_collective(node: Mapping[str, Any]) -> bool:
    """Whether a node talks to other ranks: a collective of torch, or an op of ours that names a group."""
    target = node["target"]
    if target.startswith(COLLECTIVES):
        return not target.endswith((".wait_tensor.default", ".wait_tensor"))
    group = node["kwargs"].get("group", node["args"][-1] if node["args"] else "")
    return target.startswith(REDUCES) and isinstance(group, str) and group != ""


def storages(value: Any, position: int) -> Iterable[Any]:
    """Storage numbers in a value."""
    if isinstance(value, list):
        return [key for v in value for key in storages(v, position)]
    if isinstance(value, dict) and "storage" in value:
        return [] if value["storage"] is None else [value["storage"]]
    return [("node", position)] if value is None else []


def skeleton(value: Any, read: list[int]) -> Any:
    """Arguments as a hashable value of constants and marks; the ids of the nodes go to ``read`` in order."""
    if isinstance(value, dict):
        if len(value) == 1 and type(value.get("node")) is int:
            read.append(value["node"])
            return MARK
        return ("dict", *((k, skeleton(v, read)) for k, v in value.items()))
    if isinstance(value, (list, tuple)):
        return ("list", *(skeleton(v, read) for v in value))
    return (type(value).__name__, repr(value) if isinstance(value, float) else value)


def check(data: Any) -> None:
    """Raise ValueError, saying what it is, for what is no snapshot."""
    if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
        what = data.get("schema") if isinstance(data, Mapping) else None
        said = f"its schema is {what!r}" if what else "it names no schema"
        raise ValueError(f"not a graph snapshot: {said}; expected {SCHEMA!r}")
    nodes = data.get("nodes")
    if not isinstance(nodes, list) or not all(isinstance(n, Mapping) for n in nodes):
        raise ValueError("not a graph snapshot: 'nodes' is no list of objects")
    for number, node in enumerate(nodes):
        if missing := [key for key in KEYS if key not in node]:
            raise ValueError(f"not a graph snapshot: node {number} lacks {', '.join(missing)}")
        if not isinstance(node["args"], list) or not isinstance(node["kwargs"], Mapping):
            raise ValueError(f"not a graph snapshot: node {number} has args or kwargs of the wrong type")
    if len({n["id"] for n in nodes}) != len(nodes):
        raise ValueError("not a graph snapshot: two nodes have the same id")
    if missing := [key for key in WHOLE if key not in data]:
        raise ValueError(f"not a whole graph snapshot: it lacks {', '.join(missing)}; write it again")
