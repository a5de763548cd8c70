"""`k3 kernels`: what every Triton kernel becomes for GPUs that are not here."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

WIDTH = 160  # of the table, which a narrower terminal breaks rather than shortens


def kernels(
    target: Annotated[str, typer.Option(help="Parts, with commas: sm_90,sm_100,sm_103,gfx950.")] = "",
    match: Annotated[str, typer.Option(help="Only calls whose name has this: kda, @decode, ...")] = "",
    check: Annotated[bool, typer.Option(help="Compare with the committed table; 1 if it differs.")] = False,
    write: Annotated[
        bool,
        typer.Option(help="Write the committed table anew: all parts, and all calls or those that match."),
    ] = False,
    space: Annotated[
        bool, typer.Option(help="Instead: every candidate for tiles that --match names, and which ship.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Compile every kernel at K3's sizes on one of eight ranks, without a GPU, and print what came out."""
    from ..aot import cells, parts, table
    from ..kernels.jit_triton import installed

    if not installed():
        raise ValueError("triton is not installed: pip install triton (about 280 MB) to compile kernels here")
    import importlib.metadata

    version = importlib.metadata.version("triton")
    chosen = parts.parts(target)
    if space:
        return show_space(version, chosen, match, check, write)
    wanted = [cell for cell in cells.every_cell() if match in cell.name]
    if not wanted:
        raise ValueError(
            f"no call has {match!r} in its name: {', '.join(c.name for c in cells.every_cell())}"
        )
    if write and target:
        raise ValueError("--write is for all parts: leave out --target")
    told = Console(stderr=True)
    made = {cell.name: table.measure(cell, chosen, said=told.print) for cell in wanted}
    result = {"triton": version, "cells": made}
    if write:
        table.write(version, made, keep=bool(match))
    if as_json:
        print(json.dumps(result))
    else:
        Console(width=max(WIDTH, Console().width)).print(table.shown(result))
    wrong = table.complaints(wanted, result)
    if check:
        wrong += table.differences(result, table.committed(version))
    for line in wrong:
        told.print(line)
    return 1 if wrong else 0


def show_space(version: str, chosen: list, match: str, check: bool, write: bool) -> int:
    """Compile the candidates if they are to be written or checked; print what the committed tables say."""
    from ..aot import space

    names = [name for name in space.SPACES if match in name]
    if not names:
        raise ValueError(f"no space has {match!r} in its name: {', '.join(space.SPACES)}")
    differ = []
    if check or write:
        made = space.measure(names, chosen, said=Console(stderr=True).print)
        if write:
            space.write(version, made)
        kept = space.committed().get(version, {})
        differ = [
            f"{name} {target} {label}: {found}, committed {kept.get(name, {}).get(target, {}).get(label)}"
            for name, by_target in made.items()
            for target, by_label in by_target.items()
            for label, found in by_label.items()
            if found != kept.get(name, {}).get(target, {}).get(label)
        ]
    print("\n".join([*space.shown(space.committed(), names, chosen), *differ]))
    return 1 if differ else 0
