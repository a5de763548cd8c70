"""`k3 diff`: what is different between two graphs, or what the passes did to one.

k3 diff before.json after.json                     two snapshots; exit code 0 same, 1 differs, 2 misuse
k3 diff dump/                                      what each pass changed (a K3_DUMP folder)
k3 diff old-dump/ new-dump/                        the graphs of two dumps, one by one
k3 diff checkpoints/k3-tiny                        each kind of layer before and after the passes
k3 diff checkpoints/k3-tiny --disable latent_tail  all passes against all but this one
k3 diff checkpoints/k3-tiny --inner inductor       with what Inductor's code launches and allocates
k3 diff dump/ --budget budget.toml --junit out.xml limits on ops, costs and applied rewrites
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

Format = Literal["text", "json", "mermaid", "dot", "html", "onnx"]


def diff(
    a: Annotated[
        Path, typer.Argument(help="A snapshot or timeline (JSON), a K3_DUMP folder, or a checkpoint.")
    ],
    b: Annotated[Path | None, typer.Argument(help="What to compare it with, of any of these kinds.")] = None,
    format: Annotated[Format, typer.Option(help="What to write.")] = "text",
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write to this file.")] = None,
    before: Annotated[str, typer.Option(help="Stage to start from: captured, aten, a pass.")] = "aten",
    after: Annotated[str, typer.Option(help="Stage to end with: a pass, or final.")] = "final",
    ignore: Annotated[
        list[str] | None, typer.Option(help="Attribute not to compare, such as stride.")
    ] = None,
    disable: Annotated[list[str] | None, typer.Option(help="Compare with this pass off.")] = None,
    inner: Annotated[
        Literal["aot_eager", "inductor"] | None,
        typer.Option(help="Compiler of a checkpoint's layers; of Inductor's code, launches are counted."),
    ] = None,
    at: Annotated[str | None, typer.Option(help="Sizes for costs: p.0=64,u0=3; T=64 for K3.")] = None,
    budget: Annotated[Path | None, typer.Option(help="TOML or JSON limits to hold the graphs to.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write the budget's results as JUnit XML.")] = None,
) -> int:
    """Compare graphs, price the difference, and hold graphs to a budget."""
    from .diff_inputs import comparisons
    from .diff_outputs import hold, rendered
    from .sizes import sizes_of

    started = time.perf_counter()
    sizes = sizes_of(at)
    if junit and not budget:
        raise ValueError("--junit writes the results of --budget: give one")
    found = comparisons(a, b, before, after, ignore or [], disable or [], inner)
    if budget:
        return hold(found, budget, junit, sizes, time.perf_counter() - started)
    written = rendered(found, format, sizes, None if out else sys.stdout)
    if out and isinstance(written, bytes):
        out.write_bytes(written)
    elif out:
        out.write_text(written)
    elif isinstance(written, bytes):
        raise ValueError(f"--format {format} is binary: name a file with -o")
    else:
        sys.stdout.write(written)
    return 0 if all(one.diff.same for one in found) else 1
