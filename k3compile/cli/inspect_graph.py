"""What is in a graph, a diff or a dump: nodes by op, symbols, storages that several nodes share, passes.

graph 80476be2673c: 197 nodes, 7 symbols, 12 shared storages
pass              nodes  +added  -removed  ~rewritten  moved  meta
contiguous_views  193    5       9         5           0      0
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..graphdiff.diff import diff
from .graph_files import graphs_in

KINDS = ("added", "removed", "rewritten", "moved", "meta")


def examined_graphs(path: Path) -> list[dict[str, Any]]:
    """One summary for each graph at ``path``, as plain values."""
    return [summary(data, path) for data in graphs_in(path)]


def summary(data: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """A summary of the last graph, and what changed on the way to it."""
    if data["schema"] == "k3graph/1":
        return {"graph": path.name, **contents(data), "passes": []}
    if data["schema"] == "k3diff/1":
        changes = counted(c["kind"] for c in data["changes"])
        step = {"name": "diff", "nodes": len(data["after"]["nodes"]), **changes}
        return {"graph": path.name, **contents(data["after"]), "passes": [step]}
    stages = data["stages"]
    passes = []
    for before, after in pairwise(stages):
        if before["snapshot"]["level"] != after["snapshot"]["level"]:
            continue
        changes = diff(before["snapshot"], after["snapshot"]).changes
        nodes = len(after["snapshot"]["nodes"])
        passes.append({"name": after["name"], "nodes": nodes, **counted(c.kind for c in changes)})
    return {"graph": data["graph"], **contents(stages[-1]["snapshot"]), "passes": passes}


def contents(graph: Mapping[str, Any]) -> dict[str, Any]:
    """Nodes by op, most frequent first; symbols and their ranges; storages and the nodes that share them."""
    ops = Counter("input" if n["op"] == "placeholder" else n["target"] for n in graph["nodes"])
    families: dict[int, list[str]] = {}
    for node in graph["nodes"]:
        for storage in storages(node["value"]):
            families.setdefault(storage, []).append(node["name"])
    return {
        "level": graph["level"],
        "nodes": len(graph["nodes"]),
        "ops": dict(ops.most_common()),
        "symbols": graph["symbols"],
        "storages": len(families),
        "shared": {str(s): names for s, names in families.items() if len(names) > 1},
    }


def storages(value: Any) -> set[int]:
    """Storages of a node's tensors."""
    if isinstance(value, list):
        return {s for v in value for s in storages(v)}
    if isinstance(value, dict) and value.get("storage") is not None:
        return {value["storage"]}
    return set()


def counted(kinds: Iterable[str]) -> dict[str, int]:
    found = Counter(kinds)
    return {kind: found[kind] for kind in KINDS}


def show_graph(console: Console, found: Mapping[str, Any]) -> None:
    """For people."""
    title = f"graph {found['graph']} ({found['level']} level): {found['nodes']:,} nodes"
    console.print(title, markup=False, soft_wrap=True)
    if found["passes"]:
        table = Table("pass", "nodes", *KINDS, box=None)
        for step in found["passes"]:
            table.add_row(step["name"], f"{step['nodes']:,}", *(str(step[k]) for k in KINDS))
        console.print(table)
    table = Table("op", "nodes", box=None)
    for op, count in found["ops"].items():
        table.add_row(op, f"{count:,}")
    console.print(table)
    ranges = ", ".join(range_text(name, r) for name, r in found["symbols"].items())
    console.print(f"symbols: {ranges or 'none'}", markup=False, soft_wrap=True)
    console.print(f"storages: {found['storages']}, of which {len(found['shared'])} are shared", markup=False)
    for storage, names in found["shared"].items():
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        console.print(f"  s{storage}: {shown}", markup=False, soft_wrap=True)


def range_text(name: str, bounds: Mapping[str, int | None]) -> str:
    """``2 <= s0 <= 64``"""
    low = "" if bounds["min"] is None else f"{bounds['min']} <= "
    return f"{low}{name}" + ("" if bounds["max"] is None else f" <= {bounds['max']}")
