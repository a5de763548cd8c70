"""Hand-made ``k3graph/1`` graphs and timelines of any size: equal layers, and a pass over them."""

from __future__ import annotations

from typing import Any

LAYER = 25  # nodes a layer


def tensor(storage: int, *shape: int | str, dtype: str = "float32") -> dict[str, Any]:
    stride: list[int | str] = [1]
    for size in reversed(shape[1:]):
        stride.insert(0, stride[0] * size if isinstance(size, int) else f"{size}*{stride[0]}")
    return {
        "dtype": dtype, "shape": list(shape), "stride": stride, "offset": 0, "device": "cpu",
        "storage": storage,
    }  # fmt: skip


class Maker:
    """Builds a graph node by node."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, Any]] = []
        self.edges: list[list[int]] = []

    def add(self, name: str, target: str, *args: Any, value: Any = None, op: str = "call_function") -> int:
        number = len(self.nodes)
        self.nodes.append(
            {
                "id": number, "name": name, "op": op, "target": target, "kwargs": {}, "value": value,
                "args": [{"node": a} if isinstance(a, int) and op == "call_function" else a for a in args],
                "source": f"runtime/attention.py:{50 + number % LAYER}", "from": [],
            }
        )  # fmt: skip
        if op == "call_function":
            self.edges += [[a, number] for a in args if isinstance(a, int)]
        return number

    def graph(self) -> dict[str, Any]:
        symbols = {"s0": {"min": 2, "max": None}, "u0": {"min": 0, "max": None}}
        return {
            "schema": "k3graph/1", "level": "aten", "symbols": symbols, "nodes": self.nodes,
            "edges": self.edges,
        }  # fmt: skip


def layered(layers: int, views: bool = False) -> dict[str, Any]:
    """Equal layers; with ``views`` the two gathers of each are slices and its copy is gone."""
    make = Maker()
    x = make.add("x", "x", value=tensor(0, "s0", 64), op="placeholder")
    index = make.add("rows", "rows", value=tensor(1, "u0", dtype="int64"), op="placeholder")
    at = x
    for layer in range(layers):
        storage = 10 + 20 * layer
        for i in range(2):
            old = storage + i
            if views:
                name, target, args = f"slice_{layer}_{i}", "aten.slice.Tensor", (at,)
            else:
                name, target, args = f"index_select_{layer}_{i}", "aten.index_select.default", (at, index)
            value = tensor(make.nodes[at]["value"]["storage"] if views else old, "u0", 64)
            make.add(name, target, *args, value=value)
        before = len(make.nodes) - 2
        for i in range(20):
            before = make.add(
                f"mm_{layer}_{i}", "aten.mm.default", before, value=tensor(storage + 2, "u0", 64)
            )
        make.add(f"gate_{layer}", "aten.sigmoid.default", before, value=tensor(storage + 3, "u0", 64))
        if not views:
            copied = (before, index)
            make.add(
                f"index_copy_{layer}", "aten.index_copy.default", *copied, value=tensor(storage + 4, "s0", 64)
            )
        at = make.add(
            f"add_{layer}", "aten.add.Tensor", len(make.nodes) - 1, at, value=tensor(storage + 5, "s0", 64)
        )
    make.add("output", "output", [{"node": at}], op="output")
    return make.graph()


def delta(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What the pass of ``layered`` did, told by the names."""
    name = {n["name"]: n["id"] for n in after["nodes"]}
    renamed = {n["name"]: n["name"].replace("index_select", "slice") for n in before["nodes"]}
    pairs = [[n["id"], name[renamed[n["name"]]]] for n in before["nodes"] if renamed[n["name"]] in name]
    kept = {b for b, _ in pairs}
    changes = [
        {"kind": "removed", "before": n["id"], "after": None, "detail": ""}
        for n in before["nodes"]
        if n["id"] not in kept
    ]
    for b, a in pairs:
        if (
            before["nodes"][b]["target"] != after["nodes"][a]["target"]
            and "slice" in after["nodes"][a]["target"]
        ):
            detail = "target aten.index_select.default -> aten.slice.Tensor"
            changes.append({"kind": "rewritten", "before": b, "after": a, "detail": detail})
    return {"pairs": pairs, "changes": changes}


def timeline(layers: int, costs: bool = True) -> dict[str, Any]:
    """Three stages: captured, a pass that changes nothing, and one that makes views."""
    before, after = layered(layers), layered(layers, views=True)
    remarks = [
        {
            "pass_name": "contiguous_views", "kind": "applied", "node": f"index_select_{layer}_0",
            "op": "aten.index_select", "reason": "rows are a span", "detail": "",
            "expected": {"launches": -1},
            "source": "runtime/attention.py:71", "fix_it": None,
            "proofs": [{"obligation": "end <= size", "how": "torch._check", "expression": "u0 <= s0"}],
        }
        for layer in range(layers)
    ]  # fmt: skip
    remarks.append(
        remarks[0]
        | {
            "kind": "missed", "node": "index_select_0_1", "reason": "the end is not proven", "proofs": [],
            "fix_it": "torch._check(u0 <= x.shape[0])",
        }
    )  # fmt: skip
    priced = [
        {"launches": 25 * layers, "bytes_read": "256*s0 + 64*u0"},
        {"launches": 22 * layers, "bytes_read": "256*s0"},
    ]
    return {
        "schema": "k3timeline/1",
        "graph": "0f3a",
        "stages": [
            {"name": "captured", "snapshot": before, "remarks": [], "seconds": 0.0}
            | ({"cost": priced[0]} if costs else {}),
            {"name": "canonicalize", "snapshot": before, "remarks": [], "seconds": 0.004}
            | ({"cost": priced[0]} if costs else {}),
            {
                "name": "contiguous_views", "snapshot": after, "remarks": remarks, "seconds": 0.021,
                "delta": delta(before, after),
            }
            | ({"cost": priced[1]} if costs else {}),
        ],
    }  # fmt: skip
