"""What a user points at when a verb wants graphs: a JSON file of ours, or a folder that K3_DUMP wrote.

graph.json, diff.json, timeline.json     by their schema
DUMP/<graph>/00-<pass>.before.json ...   one timeline a graph
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SCHEMAS = ("k3graph/1", "k3diff/1", "k3timeline/1")
ACCEPTED = "a k3graph/1, k3diff/1 or k3timeline/1 JSON file, or a folder written by K3_DUMP"


def read_json(path: Path) -> Any:
    """The JSON value of a file. Raises ValueError for text that is none; OSError where it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON ({error}): give {ACCEPTED}") from error


def schema_of(path: Path) -> str | None:
    """The schema a JSON file names; None for a folder, and for a file that is not ours to judge."""
    if not path.is_file():
        return None
    try:
        value = read_json(path)
    except ValueError:
        return None
    schema = value.get("schema") if isinstance(value, dict) else None
    return schema if isinstance(schema, str) else None


def is_dump(path: Path) -> bool:
    """Whether K3_DUMP wrote here: the folder of one graph, or the one above."""
    return path.is_dir() and any(path.glob("*.before.json")) | any(path.glob("*/*.before.json"))


def graphs_in(path: Path) -> list[dict[str, Any]]:
    """Every graph, diff or timeline at ``path``. Raises ValueError saying what to give instead."""
    if path.is_file():
        value = read_json(path)
        schema = value.get("schema") if isinstance(value, dict) else None
        if schema not in SCHEMAS:
            raise ValueError(f"{path} has schema {schema!r}: give {ACCEPTED}")
        return [value]
    if not path.exists():
        raise ValueError(f"{path} does not exist: give {ACCEPTED}")
    if not is_dump(path):
        raise ValueError(f"{path} holds no graphs: give {ACCEPTED}")
    return [timeline_of(folder) for folder in graph_folders(path)]


def one_graph(path: Path) -> dict[str, Any]:
    """The only graph at ``path``. Raises ValueError naming the choices where there are several."""
    if is_dump(path) and len(folders := graph_folders(path)) > 1:
        raise ValueError(f"{path} holds {len(folders)} graphs, give one: {', '.join(map(str, folders))}")
    return graphs_in(path)[0]


def graph_folders(path: Path) -> list[Path]:
    """The folders of single graphs under a dump."""
    return (
        [path]
        if any(path.glob("*.before.json"))
        else sorted({p.parent for p in path.glob("*/*.before.json")})
    )


def timeline_of(folder: Path) -> dict[str, Any]:
    """A ``k3timeline/1`` of one dumped graph."""
    stages: list[dict[str, Any]] = []
    for before in sorted(folder.glob("*.before.json")):
        stem = before.name.removesuffix(".before.json")
        after = folder / f"{stem}.after.json"
        if not after.is_file():
            raise ValueError(f"{folder} is torn: {before.name} has no {after.name} beside it; dump again")
        given = read_json(before)
        if not stages or given != stages[-1]["snapshot"]:  # the first one, or lowered to the next level
            name = f"{given['level']} graph" if stages else "captured"
            stages.append({"name": name, "snapshot": given, "remarks": [], "seconds": 0.0})
        name = stem.partition("-")[2] or stem
        stages.append({"name": name, "snapshot": read_json(after), "remarks": [], "seconds": 0.0})
    return {"schema": "k3timeline/1", "graph": folder.name, "stages": stages}
