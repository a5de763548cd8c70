"""The table of what every kernel became for every part, as JSON that is committed and as text for people.

    {"triton": "3.8.0", "cells": {"situ@decode": {"bytes": .., "flops": .., "roofline_us": {"sm_90": ..},
        "kernels": {"situ_kernel": {"sm_90": {"registers": 32, "spill": 0, ..}}}}}}

The roofline is that of the whole call, whatever the number of its kernels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

from .cells import Cell
from .compile_triton import figures
from .parts import PARTS, Part, roofline_us

TABLES = Path(__file__).parent / "tables"


def path_of(version: str) -> Path:
    """Where the table of a version of Triton is kept."""
    return TABLES / f"{version}.json"


def committed(version: str) -> dict[str, Any]:
    """The committed table. Raises ValueError, with those there are, for a version without one."""
    if not path_of(version).exists():
        there = ", ".join(sorted(p.stem for p in TABLES.glob("*.json")))
        raise ValueError(f"no table was committed for Triton {version}; there is {there or 'none'}")
    return json.loads(path_of(version).read_text())


def write(version: str, made: dict[str, Any], keep: bool) -> None:
    """Make the calls ``made`` the table to commit; with ``keep`` the other calls of the one there is stay."""
    result = {"triton": version, "cells": (committed(version)["cells"] if keep else {}) | made}
    path_of(version).write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")


def measure(cell: Cell, parts: Iterable[Part], said: Callable[[str], None] = lambda line: None) -> dict:
    """One cell of the table, compiled now."""
    parts = [part for part in parts if part.target in cell.targets]
    kernels: dict[str, dict[str, Any]] = {}
    for part in parts:
        for launch in cell.launches(part.target):
            name = getattr(launch.kernel, "name", None) or launch.kernel.fn.__name__
            kernels.setdefault(name, {})[part.target] = figures(launch, part).as_dict()
        said(f"{cell.name} {part.target}")
    times = {p.target: round(roofline_us(p, cell.num_bytes, cell.flops, cell.kind), 3) for p in parts}
    return {"bytes": cell.num_bytes, "flops": cell.flops, "roofline_us": times, "kernels": kernels}


def complaints(cells: Iterable[Cell], table: dict[str, Any]) -> list[str]:
    """What a shipped configuration may not do: spill, ask for more shared memory than there is, not fit a
    core, or lack an instruction it is said to use.
    """
    wrong = []
    for cell in cells:
        for kernel, by_target in table["cells"][cell.name]["kernels"].items():
            for target, found in by_target.items():
                where = f"{cell.name} {kernel} {target}"
                if found["spill"]:
                    wrong.append(f"{where}: spills {found['spill']} bytes a thread")
                if found["shared"] > PARTS[target].shared:
                    wrong.append(f"{where}: {found['shared']} bytes shared of {PARTS[target].shared}")
                if not found["resident"]:
                    wrong.append(f"{where}: not one program fits a core")
        for target, instruction in cell.needs:
            by_kernel = table["cells"][cell.name]["kernels"].values()
            if not any(k[target]["found"].get(instruction) for k in by_kernel if target in k):
                wrong.append(f"{cell.name} {target}: no {instruction}")
    return wrong


def shown(table: dict[str, Any]) -> Table:
    """For a terminal."""
    text = Table(
        "call", "kernel", "target", "regs", "spill", "shared", "warps", "of core", "programs", "roofline us",
        "instructions", box=None,
    )  # fmt: skip
    for name, cell in table["cells"].items():
        for kernel, by_target in cell["kernels"].items():
            for target, f in by_target.items():
                found = " ".join(f"{k}x{n}" for k, n in f["found"].items())
                of_core = f"{f['resident']}/{PARTS[target].warps_of_core}"
                numbers = (f["registers"], f["spill"], f["shared"], f["warps"])
                time = f"{cell['roofline_us'][target]:.2f}"
                text.add_row(
                    name, kernel, target, *map(str, numbers), of_core, str(f["programs"]), time, found
                )
    return text


def differences(made: dict[str, Any], kept: dict[str, Any]) -> list[str]:
    """Where what was compiled now is not what the committed table has."""
    lines = []
    for name, cell in made["cells"].items():
        there = kept["cells"].get(name)
        if there is None:
            lines.append(f"{name}: not in the committed table")
            continue
        lines += [
            f"{name}: {k} {cell[k]}, committed {there[k]}" for k in ("bytes", "flops") if cell[k] != there[k]
        ]
        for kernel, by_target in cell["kernels"].items():
            for target, found in by_target.items():
                old = there["kernels"].get(kernel, {}).get(target)
                if found != old:
                    lines.append(f"{name} {kernel} {target}: {found}, committed {old}")
    return lines
