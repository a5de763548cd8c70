"""What the passes made of one graph, stage by stage, from a K3_DUMP folder, a JSON file or a capture.

dump/3f2a-77/00-state_export.before.json      stages: captured        (Dynamo's graph)
             00-state_export.after.json               state_export
             01-canonicalize.before.json              captured.aten   (the same graph, traced again)
             01-canonicalize.after.json               canonicalize
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from .graph import SCHEMA as GRAPH_SCHEMA
from .graph import check

SCHEMA = "k3timeline/1"
FILE = re.compile(r"(\d+)-(.+)\.(before|after)\.json")


@dataclass(frozen=True)
class Stage:
    """The graph after ``name``; remarks as plain data, seconds of wall time of the pass."""

    name: str
    snapshot: Mapping[str, Any]
    remarks: tuple[Mapping[str, Any], ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """The stages of the graph called ``graph``, the captured one first.

    generated: what the inner compiler's code for the last stage launches and allocates ("after"), and what it
    would without our passes ("before"); empty where that was not asked for.
    """

    graph: str
    stages: tuple[Stage, ...]
    generated: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def remarks(self) -> list[Mapping[str, Any]]:
        """Those of all stages."""
        return [r for stage in self.stages for r in stage.remarks]

    def stage(self, name: str) -> Stage:
        """The last stage of that name; ``captured``, ``final`` and ``aten`` (before the first ATen pass) too.

        Raises ValueError with the nearest name.
        """
        if name == "final":
            return self.stages[-1]
        if name == "aten":
            return next((s for s in self.stages if s.snapshot.get("level") == "aten"), self.stages[0])
        known = [s.name for s in self.stages]
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"no stage {name!r}{hint}; stages: {', '.join(known)}, aten, final")
        return next(s for s in reversed(self.stages) if s.name == name)

    def to_json(self) -> dict[str, Any]:
        """Plain data, schema ``k3timeline/1``."""
        stages = [
            {"name": s.name, "snapshot": s.snapshot, "remarks": list(s.remarks), "seconds": s.seconds}
            for s in self.stages
        ]
        made = {"generated": dict(self.generated)} if self.generated else {}
        return {"schema": SCHEMA, "graph": self.graph, "stages": stages, **made}


def of_passes(graph: str, passes: Iterable[tuple[str, Mapping[str, Any], Mapping[str, Any]]]) -> Timeline:
    """A timeline of (pass, snapshot before, snapshot after) in the order in which the passes ran."""
    stages: list[Stage] = []
    for name, before, after in passes:
        if not stages:
            stages.append(Stage("captured", before))
        elif not follows(before, stages[-1].snapshot):  # traced again, or another body of the same graph
            name_again = f"captured.{before['level']}"
            bodies = sum(s.name.startswith(name_again) for s in stages)
            stages.append(Stage(f"{name_again}.{bodies + 1}" if bodies else name_again, before))
        stages.append(Stage(name, after, tuple(after.get("remarks", ())), after.get("seconds", 0.0)))
    return Timeline(graph, tuple(stages))


def follows(before: Mapping[str, Any], last: Mapping[str, Any]) -> bool:
    """Whether a pass started from the graph that the one before it left."""
    if "moment" in before and "moment" in last:
        return before["moment"] == last["moment"]
    return before["level"] == last["level"]


def load(path: Path) -> list[Timeline]:
    """The timelines of a K3_DUMP folder (or of one graph's folder), a timeline's JSON or a single snapshot.

    Raises ValueError, saying what it is and what is expected, for anything else.
    """
    if not path.exists():
        near = get_close_matches(path.name, [p.name for p in path.parent.glob("*")], n=1)
        hint = f" (did you mean {str(path.parent / near[0])!r}?)" if near else ""
        raise ValueError(f"{path}: no such file or folder{hint}")
    if path.is_dir():
        return from_folder(path)
    data = read(path)
    schema = data.get("schema") if isinstance(data, dict) else None
    try:
        if schema == GRAPH_SCHEMA:
            check(data)
            return [Timeline(path.stem, (Stage("captured", data),))]
        if schema == SCHEMA:
            stages = [
                Stage(s["name"], s["snapshot"], tuple(s.get("remarks", ())), s.get("seconds", 0.0))
                for s in data["stages"]
            ]
            [check(stage.snapshot) for stage in stages]
            return [Timeline(data["graph"], tuple(stages), data.get("generated") or {})]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: a broken {schema} file ({error})") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    what = f"JSON of schema {schema!r}" if schema else "JSON without a schema"
    raise ValueError(f"{path} is {what}; expected {GRAPH_SCHEMA!r} or {SCHEMA!r}, or a K3_DUMP folder")


def from_folder(path: Path) -> list[Timeline]:
    """See :func:`load`."""
    graphs = [path, *sorted(p for p in path.iterdir() if p.is_dir())]
    found = [one_graph(folder) for folder in graphs if any(FILE.fullmatch(f.name) for f in folder.iterdir())]
    if not found:
        what = "is empty" if not any(path.iterdir()) else "holds no dumped graph"
        raise ValueError(
            f"{path} {what}; expected what K3_DUMP={path} writes, or a checkpoint with config.json"
        )
    return found


def one_graph(folder: Path) -> Timeline:
    """The timeline of a folder with numbered passes."""
    names = sorted({(int(m[1]), m[2]) for f in folder.iterdir() if (m := FILE.fullmatch(f.name))})
    passes = []
    for number, name in names:
        pair = [folder / f"{number:02d}-{name}.{moment}.json" for moment in ("before", "after")]
        for file in pair:
            if not file.exists():
                raise ValueError(f"{folder} lacks {file.name}: the dump is not whole")
        snapshots = [read(file) for file in pair]
        for file, snapshot in zip(pair, snapshots):
            try:
                check(snapshot)
            except ValueError as error:
                raise ValueError(f"{file}: {error}") from error
        passes.append((name, *snapshots))
    return of_passes(folder.name, passes)


def read(path: Path) -> Any:
    """Raises ValueError for a file that is no JSON."""
    try:
        return json.loads(path.read_text())
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not JSON; expected a snapshot, a timeline or a K3_DUMP folder") from None
