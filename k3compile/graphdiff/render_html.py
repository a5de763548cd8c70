"""A timeline, a diff or one graph as a single HTML file that needs no network and no server.

    k3timeline/1 | k3diff/1 | k3graph/1  ->  {"snapshots": [graph, ...], "stages": [stage, ...]}  ->  html
    [(name, layers, any of these), ...]  ->  {"graphs": [{"name", "layers", ...}, ...]}           ->  html

A stage names its graph by number, so that a pass that changed nothing costs nothing, and carries the delta
from the stage before. Names and sources are untrusted: the page sets text, never markup, the data lie in a
block that no string can close, and the page's own policy allows no script but ours.
"""

from __future__ import annotations

import base64
import hashlib
import html as markup
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

SCRIPTS = ("model.js", "draw.js", "cost.js", "detail.js", "view.js")


def html(data: Mapping[str, Any], title: str = "") -> str:
    """The page for a ``k3timeline/1``, ``k3diff/1`` or ``k3graph/1`` value.

    Stages may hold ``cost`` (quantities, numbers or expressions) and ``delta`` ({"pairs", "changes"} from the
    stage before); what is not given is computed, but no delta between graphs of two levels. Raises ValueError
    for another schema.
    """
    schema = data.get("schema") if isinstance(data, Mapping) else None
    if schema not in READERS:
        raise ValueError(f"no page for schema {schema!r}: give one of {', '.join(READERS)}")
    content = READERS[schema](data)
    return page(title or content.pop("title"), content)


def html_of_several(graphs: Sequence[tuple[str, int, Mapping[str, Any]]], title: str = "") -> str:
    """One page for several graphs, chosen in a list at the top: (name, layers that are like it, value)."""
    if len(graphs) == 1:
        return html(graphs[0][2], title)
    contents = []
    for name, layers, data in graphs:
        if data.get("schema") not in READERS:
            raise ValueError(f"no page for schema {data.get('schema')!r}: give one of {', '.join(READERS)}")
        contents.append({**READERS[data["schema"]](data), "name": name, "layers": layers})
    return page(title or f"{len(graphs)} graphs", {"graphs": contents})


def page(title: str, content: Mapping[str, Any]) -> str:
    """The template filled in. Each piece is put in once, so that no piece can name another's place."""
    style = asset("report.css")
    script = '(() => {\n"use strict";\n' + "\n".join(map(asset, SCRIPTS)) + "})();\n"
    filled = {
        "TITLE": markup.escape(title),
        "STYLE": style,
        "SCRIPT": script,
        "STYLE_HASH": digest(style),
        "SCRIPT_HASH": digest(script),
        "DATA": inert(content),
    }
    first, *rest = asset("report.html").split("@")
    # the template's parts alternate: text, name, text, name, ...; the CSS's own @ is not in the template
    return first + "".join(filled[part] if i % 2 == 0 else part for i, part in enumerate(rest))


def asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def digest(text: str) -> str:
    """As a Content-Security-Policy names an inline block."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def inert(content: Any) -> str:
    """JSON that cannot leave its script block: no ``<``, so neither ``</script>`` nor ``<!--``."""
    words = json.dumps(content, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return words.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def of_graph(graph: Mapping[str, Any]) -> dict[str, Any]:
    """One graph: a timeline of one stage."""
    return of_stages("graph", f"{len(graph['nodes'])} nodes", [{"name": "graph", "snapshot": graph}])


def of_diff(diff: Mapping[str, Any]) -> dict[str, Any]:
    """Two graphs: a timeline of two stages."""
    costs = diff.get("costs") or {}
    delta = {"pairs": diff["pairs"], "changes": diff["changes"]}
    before = {"name": "before", "snapshot": diff["before"], "cost": costs.get("before")}
    after = {"name": "after", "snapshot": diff["after"], "cost": costs.get("after"), "delta": delta}
    changes = len(diff["changes"])
    words = "the graphs are the same" if not changes else f"{changes} change{'s' * (changes > 1)}"
    return of_stages("graph diff", words, [before, after]) | extras(diff)


def of_timeline(timeline: Mapping[str, Any]) -> dict[str, Any]:
    """A graph through its passes."""
    stages = timeline["stages"]
    words = f"{len(stages) - 1} pass{'es' * (len(stages) != 2)}"
    return of_stages(f"graph {timeline['graph']}", words, stages) | extras(timeline)


def extras(data: Mapping[str, Any]) -> dict[str, Any]:
    """What else the page shows where it is given: counts of generated code, and the sizes to start with."""
    return {key: dict(data[key]) for key in ("generated", "sizes") if data.get(key)}


def of_stages(title: str, subtitle: str, stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the page reads. Equal snapshots are kept once."""
    if not stages:
        raise ValueError("the timeline has no stage, so there is nothing to show")
    snapshots: list[Any] = []
    made = []
    for i, stage in enumerate(stages):
        before = stages[i - 1]["snapshot"] if i else None
        graph = {k: stage["snapshot"][k] for k in ("symbols", "nodes", "edges")}
        if i and graph == snapshots[-1]:
            delta = {"pairs": [[n["id"], n["id"]] for n in before["nodes"]], "changes": []}
        else:
            snapshots.append(graph)
            same_level = i and before.get("level") == stage["snapshot"].get("level")
            delta = stage.get("delta") or (delta_of(before, stage["snapshot"]) if same_level else None)
        kept = {k: stage[k] for k in ("name", "remarks", "seconds") if stage.get(k)}
        price = stage.get("cost") or price_of(stage["snapshot"])
        made.append(kept | {"snapshot": len(snapshots) - 1, "delta": delta, "cost": price})
    return {"title": title, "subtitle": subtitle, "snapshots": snapshots, "stages": made}


def delta_of(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What changed between two stages, as far as the page needs it."""
    from .diff import diff

    found = diff(dict(before), dict(after)).to_json()
    return {"pairs": found["pairs"], "changes": found["changes"]}


def price_of(graph: Mapping[str, Any]) -> dict[str, Any] | None:
    """The estimated cost; None for a graph of which no value is known, whose sums would all be nothing."""
    from .cost import cost

    return cost(graph).to_json() if any(node["value"] is not None for node in graph["nodes"]) else None


READERS = {"k3timeline/1": of_timeline, "k3diff/1": of_diff, "k3graph/1": of_graph}
