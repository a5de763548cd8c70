"""The result of a check for people: a line an op, a line a call, and what is wrong."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.table import Table

from .run import complaints

WIDTH = 140


def console() -> Console:
    """As wide as the tables, which a narrower terminal breaks rather than shortens."""
    return Console(width=max(WIDTH, Console().width))


def heading(made: dict[str, Any]) -> str:
    """Where it ran and how it ended."""
    where = made["card"] or "interpreted on a CPU: no GPU was used, nothing was timed, bfloat16 was left out"
    limits = f", held against {made['part']}" if made["part"] else ""
    driver = f", driver {made['driver']}" if made["driver"] else ""
    ended = "passed" if made["passed"] else f"{len(complaints(made))} complaints"
    versions = f"torch {made['torch']}, triton {made['triton']}"
    return f"{where}{limits}{driver}; {versions}; {made['seconds']:.0f} s: {ended}"


def text(made: dict[str, Any]) -> Group:
    """All of it."""
    parts: list[Any] = [heading(made), ops(made)]
    if made.get("cells"):
        parts.append(cells(made))
    if "prompts" in made.get("model", {}):
        m = made["model"]
        parts.append(
            f"k3-tiny, compiled in {m['compile_seconds']:.0f} s, {m['graphs']} graphs: of {m['prompts']} "
            f"prompts {m['same']} answered alike, {m['tie']} up to a tie, {len(m['wrong'])} otherwise"
        )
    return Group(*parts, *complaints(made))


def ops(made: dict[str, Any]) -> Table:
    table = Table("op", "dtype", "calls", "refused", "error / meaning's", "of tolerance", "", box=None)
    for o in made["ops"]:
        if "calls" not in o:
            table.add_row(o["op"], o["dtype"], "", "", "", "", o.get("skipped", "failed"))
            continue
        counts = str(o["calls"]), str(sum(o["refused"].values()))
        numbers = f"{o['ratio']:.3f}", f"{o['worst']:.1%}"
        table.add_row(o["op"], o["dtype"], *counts, *numbers, "failed" if o["complaints"] else "ok")
    return table


def cells(made: dict[str, Any]) -> Table:
    table = Table("call", "ms", "GB/s", "TFLOP/s", "of the roofline", "of tolerance", "", box=None)
    for c in made["cells"]:
        if "ms" not in c:
            table.add_row(c["cell"], "", "", "", "", "", c.get("skipped", "failed"))
            continue
        share = "" if c["of_roofline"] is None else f"{c['of_roofline']:.0%}"
        numbers = f"{c['ms']:.4f}", f"{c['gb_per_s']:.0f}", f"{c['tflop_per_s']:.1f}", share
        table.add_row(c["cell"], *numbers, f"{c['worst']:.1%}", "failed" if c["complaints"] else "ok")
    return table
