"""A diff as a drawing, in Mermaid's or Graphviz's language: what changed and what touches it.

%a --> %b        both graphs in one: an edge of the earlier one only is dashed
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ..passes.snapshot_text import shape_text
from .diff import Diff

FILLS = {
    "added": "#c8e6c9", "removed": "#ffcdd2", "rewritten": "#fff3c4", "meta": "#cfe8ff", "moved": "#e6d5f5",
    "same": "#eeeeee",
}  # fmt: skip
MOST = 400  # nodes; more is a hairball in any viewer


class Drawn(NamedTuple):
    """One box: its key, label and kind of change."""

    key: str
    label: str
    kind: str


def drawing(found: Diff) -> tuple[list[Drawn], list[tuple[str, str, bool]]]:
    """Boxes, and edges (from, to, whether it is gone). With no change the whole graph is drawn.

    Raises ValueError for more than 400 boxes.
    """
    partner = {a: b for b, a in found.pairs}
    kinds: dict[str, str] = {}
    for change in found.changes:
        sides = ((f"b{change.before}", change.before), (f"a{change.after}", change.after))
        for key, node in sides:
            if node is not None and not (key[0] == "b" and node in partner.values()):
                kinds.setdefault(key, split_kind(change.kind, key))
    edges: dict[tuple[str, str], bool] = {}
    for side, snapshot in (("b", found.before), ("a", found.after)):
        known = dict(found.pairs) if side == "b" else {}
        keys = {
            n["id"]: f"a{known[n['id']]}" if n["id"] in known else f"{side}{n['id']}"
            for n in snapshot["nodes"]
        }
        for source, target in snapshot["edges"]:
            edges[keys[source], keys[target]] = side == "b"
    labels = dict(labelled(found))
    near = {k for edge in edges if kinds.keys() & set(edge) for k in edge} | kinds.keys()
    kept = near if found.changes else labels.keys()
    boxes = [Drawn(key, label, kinds.get(key, "same")) for key, label in labels.items() if key in kept]
    if len(boxes) > MOST:
        raise ValueError(f"{len(boxes)} nodes to draw; {MOST} are readable: use --format html")
    return boxes, [
        (s, t, gone) for (s, t), gone in edges.items() if s in kept and t in kept and near_change(s, t, kinds)
    ]


def split_kind(kind: str, key: str) -> str:
    """What a box is: of a rewritten bit, the old nodes are removed and the new ones rewritten."""
    return "removed" if kind == "rewritten" and key[0] == "b" else kind


def near_change(source: str, target: str, kinds: dict[str, str]) -> bool:
    return not kinds or source in kinds or target in kinds


def labelled(found: Diff) -> Iterator[tuple[str, str]]:
    """Key and label of every box, of the earlier graph only what is gone."""
    kept = {b for b, _ in found.pairs}
    for node in found.before["nodes"]:
        if node["id"] not in kept:
            yield f"b{node['id']}", label_of(node)
    for node in found.after["nodes"]:
        yield f"a{node['id']}", label_of(node)


def label_of(node: dict) -> str:
    what = node["op"] if node["op"] in ("placeholder", "output") else node["target"]
    shape = "" if node["value"] is None else f" {shape_text(node['value'])}"
    return f"%{node['name']} {what}{shape}"


def mermaid(found: Diff) -> str:
    """A Mermaid flowchart. Raises ValueError for more than 400 boxes."""
    boxes, edges = drawing(found)
    rows = ["flowchart TD"]
    rows += [f'  {box.key}["{entities(box.label)}"]:::{box.kind}' for box in boxes]
    rows += [f"  {s} {'-.->' if gone else '-->'} {t}" for s, t, gone in edges]
    rows += [f"  classDef {kind} fill:{fill},stroke:#555,color:#111" for kind, fill in FILLS.items()]
    return "\n".join(rows) + "\n"


def dot(found: Diff) -> str:
    """A Graphviz digraph. Raises ValueError for more than 400 boxes."""
    boxes, edges = drawing(found)
    rows = ["digraph diff {", '  node [shape=box, style=filled, fontname="monospace"];']
    rows += [f'  {b.key} [label="{escaped(b.label)}", fillcolor="{FILLS[b.kind]}"];' for b in boxes]
    rows += [f"  {s} -> {t}{' [style=dashed]' if gone else ''};" for s, t, gone in edges]
    return "\n".join([*rows, "}"]) + "\n"


def entities(label: str) -> str:
    """Mermaid reads quotes, brackets and markup in labels unless they are written as numbers."""
    return re.sub(r"[^\w\s.,:%=*+-]", lambda m: f"#{ord(m[0])};", label.replace("\n", " "))


def escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")


RENDERERS: dict[str, Callable[[Diff], str]] = {"mermaid": mermaid, "dot": dot}
