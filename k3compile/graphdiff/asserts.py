"""Budgets: what a graph may hold and what the passes must have done, checked in CI.

    applied.contiguous_views = ">= 8"          a quantity and its limit; a bare number means "="
    ops.aten.index_select.default = 0
    launches = "<= 12"
    same_as = "golden.json"                    the graph of a snapshot or of a timeline's last stage

Written as TOML or JSON, also as ``limits = ["nodes <= 40", ...]``. Sizes for costs: ``at = {s0 = 64}``.
"""

from __future__ import annotations

import json
import operator
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from .diff import Diff, diff
from .render_text import text
from .timeline import Timeline, load

COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le, ">=": operator.ge, "==": operator.eq, "=": operator.eq, "!=": operator.ne,
    "<": operator.lt, ">": operator.gt,
}  # fmt: skip
LIMIT = re.compile(r"([\w.:-]+?)\s*(<=|>=|==|!=|=|<|>)\s*(-?\d+(?:\.\d+)?)")
COSTS = (
    "launches",
    "bytes_read",
    "bytes_written",
    "allocations",
    "peak_bytes",
    "collectives",
    "collective_bytes",
    "flops",
)
KINDS = ("added", "removed", "rewritten", "meta", "moved")
PLAIN = ("nodes", "inputs", "changes", *KINDS, *COSTS)
PREFIXES = ("ops", "applied", "missed")


@dataclass(frozen=True)
class Limit:
    """``name relation number``"""

    name: str
    relation: str
    number: float

    def __str__(self) -> str:
        return f"{self.name} {self.relation} {self.number:g}"


@dataclass(frozen=True)
class Budget:
    """Limits, the golden graph to be the same as (None: none), and the sizes costs are evaluated at."""

    limits: tuple[Limit, ...]
    same_as: Path | None = None
    at: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """One assertion: what was asked, whether it holds, and what was found."""

    name: str
    ok: bool
    message: str


def read_budget(path: Path) -> Budget:
    """A budget file. Raises ValueError naming every line that is no limit, and the nearest quantity."""
    try:
        raw = path.read_text(encoding="utf-8")
        data = tomllib.loads(raw) if path.suffix == ".toml" else json.loads(raw)
    except ValueError as error:
        raise ValueError(
            f"{path} is no {'TOML' if path.suffix == '.toml' else 'JSON'} budget: {error}"
        ) from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} is no budget; expected names and limits, for instance nodes = '<= 40'")
    data = dict(data)
    same_as, at, listed = data.pop("same_as", None), data.pop("at", {}), data.pop("limits", [])
    written = [f"{k} {'= ' if isinstance(v, (int, float)) else ''}{v}" for k, v in flat(data)] + list(listed)
    limits, wrong = [], []
    for line in written:
        try:
            limits.append(limit(str(line)))
        except ValueError as error:
            wrong.append(str(error))
    if not isinstance(at, dict) or not all(type(v) is int for v in at.values()):
        wrong.append(f'at is {at!r}; expected sizes and numbers, for instance "p.0" = 64')
    if wrong:
        raise ValueError(f"{path}: " + "; ".join(wrong))
    return Budget(tuple(limits), path.parent / same_as if same_as else None, at)


def flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names: TOML reads ``ops.aten.mm = 1`` as tables in tables."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def limit(line: str) -> Limit:
    """``applied.contiguous_views >= 8``. Raises ValueError for what is none."""
    found = LIMIT.fullmatch(line.strip())
    if not found:
        raise ValueError(f"{line!r} is no limit; expected for instance 'nodes <= 40'")
    name = found[1]
    head, _, rest = name.partition(".")
    if name not in PLAIN and not (head in PREFIXES and rest):
        close = get_close_matches(name if not rest else head, [*PLAIN, *PREFIXES], n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(
            f"no quantity {name!r}{hint}; quantities: {', '.join(PLAIN)}, ops.OP, applied.PASS, missed.PASS"
        )
    return Limit(name, found[2], float(found[3]))


def check(budget: Budget, timeline: Timeline, found: Diff | None = None) -> list[Result]:
    """Each limit held against the last stage; ``found``: the diff that changes are counted in."""
    results = []
    for one in budget.limits:
        try:
            value = quantity(one.name, timeline, found, budget.at)
        except ValueError as error:
            results.append(Result(str(one), False, str(error)))
            continue
        ok = COMPARE[one.relation](value, one.number)
        said = f"{one.name} is {value}, allowed: {one.relation} {one.number:g}"
        results.append(Result(str(one), ok, said if ok else "\n".join([said, *reasons(one.name, timeline)])))
    if budget.same_as is not None:
        golden = load(budget.same_as)[0].stages[-1].snapshot
        change = diff(golden, timeline.stages[-1].snapshot)
        results.append(Result(f"same_as {budget.same_as.name}", change.same, text(change).rstrip()))
    return results


def quantity(name: str, timeline: Timeline, found: Diff | None, at: Mapping[str, int]) -> float:
    """One number. Raises ValueError where it has none: changes without a diff, a cost without a size."""
    nodes = timeline.stages[-1].snapshot["nodes"]
    head, _, rest = name.partition(".")
    if head == "ops":
        return sum(
            n["target"] == rest or n["target"].startswith(f"{rest}.")
            for n in nodes
            if n["op"] != "placeholder"
        )
    if head in ("applied", "missed"):
        return sum(r["kind"] == head and r["pass_name"] == rest for r in timeline.remarks)
    if name in ("nodes", "inputs"):
        return sum(name == "nodes" or n["op"] == "placeholder" for n in nodes)
    if name in ("changes", *KINDS):
        if found is None:
            raise ValueError(f"{name} needs two graphs")
        return sum(name in ("changes", c.kind) for c in found.changes)
    from . import cost

    measured = cost.cost(timeline.stages[-1].snapshot)
    value = measured.at(at)[name] if at or name == "peak_bytes" else getattr(measured, name)
    if getattr(value, "free_symbols", None):
        raise ValueError(f'{name} is {value}: give the sizes, at = {{"p.0" = 64}}')
    return int(value)


def reasons(name: str, timeline: Timeline) -> list[str]:
    """Why a pass left sites, where the limit is on how many it rewrote."""
    head, _, rest = name.partition(".")
    if head not in ("applied", "missed"):
        return []
    kind = "missed" if head == "applied" else head
    said = Counter(
        f"{r['op']} at {r.get('source') or r['node']}: {r['reason']}"
        for r in timeline.remarks
        if r["pass_name"] == rest and r["kind"] in (kind, "note")
    )
    known = sorted({s.name for s in timeline.stages})
    if rest not in known:
        close = get_close_matches(rest, known, n=1)
        return [f"no pass {rest!r} ran{f' (did you mean {close[0]!r}?)' if close else ''}"]
    return [f"{f'x{n} ' if n > 1 else ''}{line}" for line, n in said.items()]
