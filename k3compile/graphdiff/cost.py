"""What a graph costs: launches, bytes, allocations, peak memory, collectives, operations, from its snapshot.

    before = cost(snapshot)         symbolic: bytes_read = 4*u1*7168 + ...
    before.at({"u1": 64, ...})      numbers, and the peak

An estimate before fusion, one launch an operation; the code that Inductor makes of the graph is counted
beside it (``k3compile.generated``). A functional write costs what it writes: its target is taken to be
reused where nothing else reads the old value, as inner compilers do, and copied where something does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .cost_rules import FREE, Call, Work, work_of
from .figures import COUNTED, Cost, Life, total
from .measures import measures
from .sizes import Size, bytes_of

SCATTERS = (
    "aten.index_copy.",
    "aten.index_put.",
    "aten.slice_scatter.",
    "aten.select_scatter.",
    "aten.scatter.",
)
FUNCTIONALIZED = "auto_functionalized"
DYNAMO = {  # spellings of Dynamo's graphs
    "_C._nn.linear": "aten.linear.default",
    "matmul": "aten.mm.default",
    "operator.matmul": "aten.mm.default",
    "index_select": "aten.index_select.default",
    "empty": "aten.empty.default",
    "new_empty": "aten.new_empty.default",
}


def cost(snapshot: Mapping[str, Any]) -> Cost:
    """The cost of a ``k3graph/1`` snapshot. Raises ValueError for another schema."""
    if snapshot.get("schema") != "k3graph/1":
        raise ValueError(f"schema is {snapshot.get('schema')!r}; a cost needs a k3graph/1 snapshot")
    return Walk(snapshot).cost()


class Walk:
    """One pass over the nodes, in order."""

    def __init__(self, snapshot: Mapping[str, Any]) -> None:
        self.nodes: list[Mapping[str, Any]] = snapshot["nodes"]
        self.by_id = {node["id"]: node for node in self.nodes}
        self.place = {node["id"]: place for place, node in enumerate(self.nodes)}
        self.readers: dict[int, list[int]] = {}
        for source, reader in snapshot["edges"]:
            self.readers.setdefault(source, []).append(self.place[reader])
        self.owner: dict[
            int, int | None
        ] = {}  # node -> node whose allocation it lives in; None: the caller's
        self.sums: dict[str, list[Size]] = {name: [] for name in COUNTED}
        self.sizes: dict[int, Size] = {}  # allocating node -> bytes

    def cost(self) -> Cost:
        for node in self.nodes:
            if node["op"] in ("placeholder", "get_attr"):
                self.owner[node["id"]] = None
            elif node["op"] in ("call_function", "call_method"):
                self.visit(node)
        totals = {name: total(values) for name, values in self.sums.items()}
        names = measures(self.nodes)
        return Cost(
            **totals,
            lives=tuple(self.lives()),
            symbols={symbol: first for symbol, (first, *_) in names.items()},
            names={name: symbol for symbol, called in names.items() for name in called},
        )

    def visit(self, node: Mapping[str, Any]) -> None:
        """Count one node and find whose memory its result is."""
        target = aten_name(node["target"])
        inputs = list(nodes_in([node["args"], node["kwargs"]]))
        if target == "aten.copy_.default":
            self.copy_back(node)
        elif FUNCTIONALIZED in target:
            self.functionalized(node)
        elif target == "aten.copy.default" and self.is_scattered(node):
            self.owner[node["id"]] = self.owner.get(inputs[-1])
        elif node.get("writes") and self.is_view(node, inputs):
            self.in_place(node, inputs)
        elif target in FREE or not tensors_of(node["value"]) or self.is_view(node, inputs):
            self.owner[node["id"]] = self.owner.get(inputs[0]) if inputs else None
        elif target.startswith(SCATTERS):
            self.scatter(node)
        else:
            results = tensors_of(node["value"])
            self.count(work_of(self.call(node, target)), results)
            self.allocate(node["id"], results)

    def in_place(self, node: Mapping[str, Any], inputs: list[int]) -> None:
        """A write of a graph that is not functional yet: of its last tensor's rows, or of all it returns."""
        sources = [i for i in inputs if i not in node["writes"]]
        moved = max((size_of(self.by_id[i]["value"]) for i in sources[-1:]), default=0)
        moved = moved or size_of(node["value"])
        self.owner[node["id"]] = self.owner.get(inputs[0])
        self.count(Work(read=moved, written=moved), [])

    def is_scattered(self, node: Mapping[str, Any]) -> bool:
        """Whether a copy is ``x[i] = y`` made functional: a scatter takes it, and moves the rows."""
        readers = [aten_name(self.nodes[place]["target"]) for place in self.readers.get(node["id"], ())]
        return bool(readers) and all(reader.startswith(SCATTERS) for reader in readers)

    def is_view(self, node: Mapping[str, Any], inputs: list[int]) -> bool:
        """Whether the only result is memory of an argument."""
        storages = {t["storage"] for t in tensors_of(node["value"])}
        given = {t["storage"] for i in inputs for t in tensors_of(self.by_id[i]["value"])}
        return bool(storages) and None not in storages and storages <= given

    def scatter(self, node: Mapping[str, Any]) -> None:
        """A functional write of rows: the rows, and the whole target where its old value is still needed."""
        target, *rest = node["args"]
        source = max(nodes_in(rest), key=lambda i: self.rank(i), default=None)
        rows = (
            total([bytes_of(t) for t in tensors_of(self.by_id[source]["value"])]) if source is not None else 0
        )
        self.reuse(node, target["node"])
        self.count(Work(read=rows, written=rows, flops=0), [])

    def rank(self, node: int) -> int:
        """Dimensions of a node's value, so that a scatter's source is told from its index."""
        found = tensors_of(self.by_id[node]["value"])
        return 2 * len(found[0]["shape"]) + found[0]["dtype"].startswith("float") if found else -1

    def functionalized(self, node: Mapping[str, Any]) -> None:
        """A functionalised write: the op's own work; its bases are reused or copied."""
        op, bases = node["args"][0]["op"], [b["node"] for b in node["kwargs"].get("_all_bases", [])]
        results = node["value"][: len(node["value"]) - len(bases)]
        own = [r for r in results if isinstance(r, Mapping) and "shape" in r]
        self.count(work_of(self.call(node, op, bases, own)), own)
        self.allocate(node["id"], own)
        for base in bases:
            self.reuse(node, base)

    def reuse(self, node: Mapping[str, Any], base: int) -> None:
        """Let ``node`` write in ``base``'s memory, or pay for a copy where the old value is read later."""
        place = self.place[node["id"]]
        later = [r for r in self.readers.get(base, ()) if r > place and not self.is_epilogue(r, base)]
        if later:
            values = tensors_of(self.by_id[base]["value"])
            size = size_of(values)
            self.count(Work(read=size, written=size), [])
            self.allocate(node["id"], values)
        else:
            self.owner.setdefault(node["id"], self.owner.get(base))

    def is_epilogue(self, reader: int, base: int) -> bool:
        """Whether a reader is the final ``copy_`` of a new value into an input."""
        node = self.nodes[reader]
        return node["target"] == "aten.copy_.default" and node["args"][0] == {"node": base}

    def copy_back(self, node: Mapping[str, Any]) -> None:
        """A final ``copy_`` into an input: nothing where the value was made in that memory."""
        target, source = (a["node"] for a in node["args"][:2])
        self.owner[node["id"]] = self.owner.get(target)
        if not self.made_in(source, target):
            size = size_of(self.by_id[target]["value"])
            self.count(Work(read=size, written=size), [])

    def made_in(self, node: int, target: int) -> bool:
        """Whether ``node`` is what a functional write left of ``target``."""
        while node != target:
            found = self.by_id[node]
            sources = list(nodes_in(found["args"]))
            if not found["target"].startswith(SCATTERS) and found["target"] not in FREE:
                return False
            written = self.base_of(found, self.by_id[sources[0]])
            if written is None:
                return False
            node = written
        return True

    def base_of(self, result: Mapping[str, Any], source: Mapping[str, Any]) -> int | None:
        """The node whose memory ``result`` shows; None for an op's own result."""
        if result["target"] != "operator.getitem" or FUNCTIONALIZED not in source["target"]:
            return source["id"]
        bases = [b["node"] for b in source["kwargs"].get("_all_bases", [])]
        place = result["args"][1] - (len(source["value"]) - len(bases))
        return bases[place] if 0 <= place < len(bases) else None

    def call(self, node, op, bases: Sequence[int] = (), results: Sequence[Any] | None = None) -> Call:
        """A node as the rules see it. A functionalised call gives every argument by name, its bases too."""
        named = {k: self.seen(v) for k, v in node["kwargs"].items() if not k.startswith("_")}
        for key, place in node["kwargs"].items():
            if key.endswith("_base_index") and isinstance(place, int):
                named[key[1 : -len("_base_index")]] = self.seen({"node": bases[place]})
        results = tensors_of(node["value"]) if results is None else results
        args = [] if bases else [self.seen(a) for a in node["args"]]
        return Call(op, tuple(args), named, tuple(results), tuple(node.get("sends", ())))

    def seen(self, argument: Any) -> Any:
        """An encoded argument with every node replaced by its value."""
        if isinstance(argument, Mapping) and argument.keys() == {"node"}:
            return self.by_id[argument["node"]]["value"]
        return [self.seen(a) for a in argument] if isinstance(argument, list) else argument

    def count(self, work: Work, results: Sequence[Mapping[str, Any]]) -> None:
        written = size_of(list(results)) if work.written is None else work.written
        for name, amount in (
            ("launches", work.launches),
            ("bytes_read", work.read),
            ("bytes_written", written),
            ("collectives", work.collectives),
            ("collective_bytes", work.collective_bytes),
            ("flops", work.flops),
        ):
            self.sums[name].append(amount)

    def allocate(self, node: int, results: Sequence[Mapping[str, Any]]) -> None:
        size = size_of(list(results))
        if results:
            self.owner[node] = node
            self.sizes[node] = total([self.sizes.get(node, 0), size])
            self.sums["allocations"].append(len(results))
            self.sums["allocated_bytes"].append(size)

    def lives(self) -> Iterator[Life]:
        """From the allocating node to the last reader of anything in that memory."""
        last = {node: self.place[node] for node in self.sizes}
        for node, owner in self.owner.items():
            if owner in last:
                last[owner] = max(last[owner], *self.readers.get(node, ()), self.place[node])
        for node, size in self.sizes.items():
            yield Life(self.place[node], last[node], size)


def aten_name(target: str) -> str:
    """The name the rules know; Dynamo's graphs spell some operations otherwise."""
    if target.startswith("_ops."):
        return f"{target.removeprefix('_ops.')}.default"
    return DYNAMO.get(target.removeprefix("torch."), target)


def nodes_in(argument: Any) -> Iterator[int]:
    """Ids of the nodes in an encoded argument, in order."""
    if isinstance(argument, Mapping):
        if argument.keys() == {"node"}:
            yield argument["node"]
        else:
            for one in argument.values():
                yield from nodes_in(one)
    elif isinstance(argument, (list, tuple)):
        for one in argument:
            yield from nodes_in(one)


def tensors_of(value: Any) -> list[Mapping[str, Any]]:
    """The tensors of a node's value."""
    if isinstance(value, list):
        return [t for v in value for t in tensors_of(v)]
    return [value] if isinstance(value, Mapping) and "shape" in value else []


def size_of(value: Any) -> Size:
    """Bytes of all tensors of a value."""
    return total([bytes_of(t) for t in tensors_of(value)])
