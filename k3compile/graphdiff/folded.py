"""Changes put together for people: a replaced bit is one unit, and equal units are told once, "x69".

6 changes of kind rewritten in groups 0, 1, 2   ->   one unit x3: index_select -> slice
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..passes.snapshot_text import line, shape_text
from .diff import Change, Diff

NAME = re.compile(r"%[\w.]+")


@dataclass(frozen=True)
class Unit:
    """What is told at once, the first of ``times`` equal ones: a title, and lines ``- old`` and ``+ new``."""

    kind: str
    title: str
    lines: tuple[str, ...]
    times: int


def units(diff: Diff) -> list[Unit]:
    """All changes, equal ones folded, in order of the first."""
    nodes = [{n["id"]: n for n in snapshot["nodes"]} for snapshot in (diff.before, diff.after)]
    names = [{i: f"%{n['name']}" for i, n in one.items()} for one in nodes]
    together: dict[Any, list[Change]] = {}
    for number, change in enumerate(diff.changes):
        key = ("alone", number) if change.group is None else ("group", change.group)
        together.setdefault(key, []).append(change)
    equal: dict[Any, list[list[Change]]] = {}
    for changes in together.values():
        equal.setdefault(signature(changes, nodes), []).append(changes)
    return [unit(group[0], len(group), nodes, names) for group in equal.values()]


def signature(changes: list[Change], nodes: list[dict[int, Mapping[str, Any]]]) -> Any:
    """What makes two units equal: kinds, ops, shapes and details, names of nodes left out."""
    words = []
    for change in changes:
        sides = [one.get(i) for one, i in zip(nodes, (change.before, change.after))]
        ops = tuple(
            (n["target"] if n["op"] != "placeholder" else "input", shape_text(n["value"])) if n else None
            for n in sides
        )
        words.append((change.kind, ops, NAME.sub("%", change.detail)))
    return tuple(sorted(words, key=str))


def unit(changes: list[Change], times: int, nodes: list[Any], names: list[Any]) -> Unit:
    """The first of some equal units, as lines."""
    first = changes[0]
    old = [nodes[0][c.before] for c in changes if c.before is not None]
    new = list({c.after: nodes[1][c.after] for c in changes if c.after is not None}.values())
    paired = first.group is None and first.before is not None and first.after is not None
    if first.before is None and first.after is None:
        return Unit(first.kind, first.detail, (), times)
    if paired:
        where = f" ({old[0]['source']})" if old[0].get("source") else ""
        return Unit(first.kind, f"{names[0][first.before]}{where}: {first.detail}", (), times)
    if first.group is None:
        mark, one = ("-", old[0]) if old else ("+", new[0])
        return Unit(first.kind, first.detail, (f"{mark} {spelled(one, names[0 if old else 1])}",), times)
    lines = [f"- {spelled(n, names[0])}" for n in old] + [f"+ {spelled(n, names[1])}" for n in new]
    title = f"{ops_of(old)} -> {ops_of(new)}"
    return Unit(first.kind, title, tuple(lines), times)


def ops_of(nodes: list[Mapping[str, Any]]) -> str:
    """Their ops, in order of the first of each: ``aten.arange.start, aten.index_select.default x3``."""
    counts = Counter(n["target"] for n in nodes)
    return ", ".join(f"{op} x{count}" if count > 1 else op for op, count in counts.items())


def spelled(node: Mapping[str, Any], names: Mapping[int, str]) -> str:
    return line({"source": None, **node}, names)
