"""What a user points at when a verb wants graphs: a JSON file of ours, or a folder that K3_DUMP wrote.

graph.json, diff.json, timeline.json     by their schema
DUMP/<graph>/00-<pass>.before.json ...   one timeline a graph
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..graphdiff.graph import check
from ..graphdiff.timeline import from_folder, load

SCHEMAS = ("k3graph/1", "k3diff/1", "k3timeline/1")
ACCEPTED = "a k3graph/1, k3diff/1 or k3timeline/1 JSON file, or a folder written by K3_DUMP"


def schema_of(path: Path) -> str | None:
    """The schema a JSON file names; None for a folder, and for a file that is not ours to judge."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return None
    schema = value.get("schema") if isinstance(value, dict) else None
    return schema if isinstance(schema, str) else None


def check_model(path: Path, else_allowed: str) -> None:
    """Raise ValueError, in one line, for a file or folder that cannot be a model's configuration."""
    wanted = f"give a checkpoint's folder, its config.json, or {else_allowed}"
    if path.is_dir():
        if is_dump(path):
            raise ValueError(f"{path} was written by K3_DUMP: `k3 diff {path}` tells what the passes did")
        return  # what a folder lacks is told by what reads it
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not JSON: {wanted}") from None
    if not isinstance(value, dict) or "model_type" not in value:
        raise ValueError(f"{path} is JSON, but no configuration of a model (no model_type): {wanted}")


def is_dump(path: Path) -> bool:
    """Whether K3_DUMP wrote here: the folder of one graph, or the one above."""
    return path.is_dir() and any(True for pattern in ("", "*/") for _ in path.glob(f"{pattern}*.before.json"))


def graphs_in(path: Path) -> list[dict[str, Any]]:
    """Every graph, diff or timeline at ``path``. Raises ValueError saying what to give instead."""
    if not path.is_file():
        return [timeline.to_json() for timeline in load(path)]
    schema = schema_of(path)
    if schema not in SCHEMAS:
        what = f"has schema {schema!r}" if schema else "is no JSON with a schema"
        raise ValueError(f"{path} {what}: give {ACCEPTED}")
    value = json.loads(path.read_text(encoding="utf-8"))
    try:
        check_whole(value)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is a broken {schema} ({error}): write it again") from error
    return [value]


def check_whole(value: dict[str, Any]) -> None:
    """Raises ValueError, KeyError or TypeError for a file of ours of which a part is missing."""
    if value["schema"] == "k3timeline/1":
        graphs = [stage["snapshot"] for stage in value["stages"] if stage["name"]]
        value["graph"]
        if not graphs:
            raise ValueError("no stages")
    elif value["schema"] == "k3diff/1":
        graphs = [value["before"], value["after"]]
        value["pairs"], value["changes"]
    else:
        graphs = [value]
    for graph in graphs:
        check(graph)
        graph["level"], graph["symbols"], graph["edges"]


def one_graph(path: Path) -> dict[str, Any]:
    """The only graph at ``path``. Raises ValueError naming the choices where there are several."""
    if path.is_dir() and len(found := from_folder(path)) > 1:
        names = ", ".join(str(path / timeline.graph) for timeline in found)
        raise ValueError(f"{path} holds {len(found)} graphs, give one: {names}")
    return graphs_in(path)[0]
