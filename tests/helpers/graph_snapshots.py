"""Snapshots made up for tests of the graph diff: random ones, and the same ones written down differently."""

import copy
import random
from itertools import pairwise

OPS = ["aten.add.Tensor", "aten.mul.Tensor", "aten.sub.Tensor", "aten.relu.default", "aten.cat.default"]


def tensor(storage, shape=("s0", 8), dtype="float32", stride=None):
    stride = [shape[1], 1] if stride is None else stride
    return {
        "dtype": dtype, "shape": list(shape), "stride": list(stride), "offset": 0, "device": "cpu",
        "storage": storage,
    }  # fmt: skip


def node(id, op, target, args=(), value=None, kwargs=None, name=None, **more):
    return {
        "id": id, "name": name or f"n{id}", "op": op, "target": target, "args": list(args),
        "kwargs": kwargs or {}, "value": value, "source": None, "from": [], **more,
    }  # fmt: skip


def graph(nodes, symbols=("s0",)):
    edges = [[r, n["id"]] for n in nodes for r in dict.fromkeys(reads(n))]
    return {
        "schema": "k3graph/1", "level": "aten", "nodes": nodes, "edges": edges,
        "symbols": {s: {"min": 0 if s[0] == "u" else 2, "max": None} for s in symbols},
    }  # fmt: skip


def reads(one):
    """Ids that a node reads, in order."""
    found = []

    def walk(value):
        if isinstance(value, dict):
            if "node" in value:
                found.append(value["node"])
            else:
                [walk(v) for v in value.values()]
        elif isinstance(value, list):
            [walk(v) for v in value]

    walk(one["args"])
    walk(one["kwargs"])
    return found


def ref(id):
    return {"node": id}


def random_graph(seed, size=30, inputs=4, writes=2):
    """A random program: pure ops with few names, hence twins; views, data-dependent sizes, writes."""
    rng = random.Random(seed)
    nodes = [node(i, "placeholder", f"x{i}", value=tensor(i)) for i in range(inputs)]
    symbols, sized = ["s0"], []
    for i in range(inputs, inputs + size):
        near = range(max(0, i - 8), i) if rng.random() < 0.7 else range(max(0, i - 300), i)
        pool = [j for j in near if isinstance(nodes[j]["value"], dict) and "shape" in nodes[j]["value"]] or [
            0
        ]
        kind = rng.random()
        if kind < 0.08:
            sized.append(i)
            symbols.append(f"u{len(symbols) - 1}")
            value = {"sym": symbols[-1]}
            nodes.append(node(i, "call_function", "aten.item.default", [ref(rng.choice(pool))], value))
        elif kind < 0.2:
            base = rng.choice(pool)
            value = tensor(nodes[base]["value"]["storage"], (8, "s0"), stride=(1, 8))
            nodes.append(node(i, "call_function", "aten.t.default", [ref(base)], value))
        elif kind < 0.3 and writes:
            base = rng.randrange(inputs)
            value = nodes[base]["value"]
            args = [ref(base), ref(rng.choice(pool))]
            nodes.append(node(i, "call_function", "aten.add_.Tensor", args, value, writes=[base]))
        else:
            target = rng.choice(OPS)
            by = nodes[rng.choice(sized)] if sized and rng.random() < 0.4 else None
            shape = (f"s0 + {by['value']['sym']}", 8) if by else ("s0", 8)
            chosen = [ref(rng.choice(pool)) for _ in range(1 if "relu" in target else 2)]
            args = [chosen, 1] if "cat" in target else [*chosen]
            kwargs = {"alpha": rng.choice([1, 2])} if "add" in target else {}
            kwargs |= {"rows": ref(by["id"])} if by else {}
            nodes.append(node(i, "call_function", target, args, tensor(i, shape), kwargs))
    last = len(nodes)
    ends = [n["id"] for n in nodes[-3:]]
    nodes.append(node(last, "output", "output", [[ref(e) for e in ends]]))
    return graph(nodes, symbols)


def constraints(data):
    """id -> ids that have to stand before it: what it reads, and what touches memory that is written."""
    before = {n["id"]: set(reads(n)) for n in data["nodes"]}
    ids = {n["id"]: n for n in data["nodes"]}
    touched = {}
    for one in data["nodes"]:
        memory = {storage_of(ids[r]) for r in reads(one)} - {None}
        wrote = {storage_of(ids[w]) for w in one.get("writes", ())}
        for key in memory:
            for other, other_wrote in touched.get(key, ()):
                if other_wrote or key in wrote:
                    before[one["id"]].add(other)
            touched.setdefault(key, []).append((one["id"], key in wrote))
    inputs = [n["id"] for n in data["nodes"] if n["op"] == "placeholder"]
    for first, second in pairwise(inputs):
        before[second].add(first)
    return before


def storage_of(one):
    return one["value"]["storage"] if isinstance(one["value"], dict) and "storage" in one["value"] else None


def rewritten_down(data, seed):
    """The same graph in another topological order, with other ids, names, symbols and storage numbers."""
    rng = random.Random(seed)
    data = copy.deepcopy(data)
    waiting = constraints(data)
    nodes = {n["id"]: n for n in data["nodes"]}
    order = []
    while waiting:
        ready = sorted(
            i for i, need in waiting.items() if not need & waiting.keys() and nodes[i]["op"] != "output"
        )
        order.append(rng.choice(ready) if ready else next(iter(waiting)))
        del waiting[order[-1]]
    ids = {old: new for new, old in enumerate(order)}
    names = list(data["symbols"])
    fresh = [f"{n[0]}{7 + i}" for i, n in enumerate(names)]
    rng.shuffle(fresh)
    renamed = {}
    for kind in "su":
        renamed |= dict(zip([n for n in names if n[0] == kind], [n for n in fresh if n[0] == kind]))
    storages = list(range(len(data["nodes"])))
    rng.shuffle(storages)
    made = [respelled(nodes[old], ids, renamed, storages) for old in order]
    for one in made:
        one["name"] = f"m{rng.randrange(10**6)}_{one['id']}"
        one["source"] = f"a/b.py:{rng.randrange(99)}"
    return graph(made) | {"symbols": {renamed[k]: v for k, v in data["symbols"].items()}}


def respelled(value, ids, symbols, storages, key=None):
    if isinstance(value, dict):
        if set(value) == {"node"}:
            return {"node": ids[value["node"]]}
        return {k: respelled(v, ids, symbols, storages, k) for k, v in value.items()}
    if key == "id":
        return ids[value]
    if key == "storage":
        return storages[value]
    if isinstance(value, list):
        return (
            [ids[v] for v in value]
            if key == "writes"
            else [respelled(v, ids, symbols, storages, key) for v in value]
        )
    if isinstance(value, str) and key in ("shape", "stride", "sym", "offset"):
        parts = [symbols.get(p, p) for p in value.split(" + ")]
        return " + ".join(sorted(parts))
    return value
