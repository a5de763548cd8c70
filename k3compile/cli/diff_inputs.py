"""What `k3 diff` compares: snapshots, timelines, dumps, or a checkpoint's kinds of layer, compiled here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..graphdiff.diff import Diff
from ..graphdiff.diff import diff as compare
from ..graphdiff.timeline import Timeline, load


@dataclass(frozen=True)
class Comparison:
    """One graph, or ``times`` layers of a kind: the diff, and the timeline that the later side is of.

    stepwise: all of the timeline is meant, pass by pass. generated: counts in the inner compiler's code of
    both sides ("before", "after"), where they are known. ignore: attributes not to compare.
    """

    name: str
    times: int
    diff: Diff
    timeline: Timeline
    stepwise: bool
    generated: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()


def comparisons(
    a: Path,
    b: Path | None,
    before: str,
    after: str,
    ignore: list[str],
    disable: list[str],
    inner: str | None = None,
) -> list[Comparison]:
    """Raises ValueError for what is no graph, for sides of different length, for nothing to compare."""
    if disable and (b is not None or not is_checkpoint(a)):
        raise ValueError("--disable compares a checkpoint with itself: k3 diff CHECKPOINT --disable PASS")
    if inner and not any(is_checkpoint(path) for path in (a, b) if path):
        raise ValueError("--inner compiles a checkpoint's layers: k3 diff CHECKPOINT --inner inductor")
    left = graphs(a, disable, inner)
    if disable:
        right = graphs(a, [], inner)
    elif b is not None:
        right = graphs(b, [], inner)
    else:
        return [within(name, times, t, before, after, ignore, a) for name, times, t in left]
    return [
        Comparison(
            name,
            times,
            compare(old.stage(after).snapshot, t.stage(after).snapshot, ignore),
            t,
            False,
            {k: side.generated["after"] for k, side in (("before", old), ("after", t)) if side.generated},
        )
        for (_, _, old), (name, times, t) in paired(left, right, a, b)
    ]


def within(
    name: str, times: int, one: Timeline, before: str, after: str, ignore: list[str], path: Path
) -> Comparison:
    """A graph before and after its passes, or two stages between: the stages from the one to the other."""
    if len(one.stages) < 2:
        raise ValueError(f"{path} is one graph; name another to compare it with")
    old, new = one.stage(before), one.stage(after)
    first, last = (next(i for i, s in enumerate(one.stages) if s is stage) for stage in (old, new))
    if first > last:
        raise ValueError(f"--before {before} comes after --after {after}: swap them")
    whole = (before, after) == ("aten", "final")
    part = one if whole else replace(one, stages=one.stages[first : last + 1])
    found = compare(old.snapshot, new.snapshot, ignore)
    made = one.generated if after == "final" else {}
    return Comparison(name, times, found, part, len(part.stages) > 1, made, tuple(ignore))


def paired(left: list, right: list, a: Path, b: Path | None) -> list:
    """Graphs side by side: of the same name where all have one, else in order. Raises ValueError."""
    by_name = {name: one for one in right for name in [one[0]]}
    if all(one[0] in by_name for one in left) and len(left) == len(right):
        return [(one, by_name[one[0]]) for one in left]
    if len(left) != len(right):
        raise ValueError(
            f"{a} has {len(left)} graphs and {b} has {len(right)}: name one graph's folder of each"
        )
    return list(zip(left, right))


def is_checkpoint(path: Path) -> bool:
    return path.name.endswith("config.json") or (path / "config.json").is_file()


def graphs(path: Path, disable: list[str], inner: str | None = None) -> list[tuple[str, int, Timeline]]:
    """(name, how many layers are like it, timeline) of every graph a path stands for."""
    if not is_checkpoint(path):
        return [(one.graph, 1, one) for one in load(path)]
    from ..graph_capture import QUICK, capture_kinds
    from ..options import CompileOptions, pass_names, read_switches, unknown_names
    from ..runtime.config import K3Config

    read_switches()  # a mistake in them is told here, not by a compile that fails
    if wrong := unknown_names(disable, pass_names()):
        raise ValueError(f"--disable names no pass: {wrong}; passes: {', '.join(pass_names())}")
    options: Any = CompileOptions(inner=inner or QUICK, features="all", disable=tuple(disable))
    kinds = capture_kinds(K3Config.from_file(path), options)
    return [(k.name, k.layers, replace(k.timeline, graph=k.name)) for k in kinds]
