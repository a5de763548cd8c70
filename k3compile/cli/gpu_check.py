"""`k3 gpu-check`: every Triton kernel on the GPU that is here, and the tiny model compiled with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def gpu_check(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the JSON there.")] = None,
    interpret: Annotated[
        bool, typer.Option(help="Without a GPU: the kernels interpreted on this CPU, untimed.")
    ] = False,
    match: Annotated[str, typer.Option(help="Only ops whose name has this: kda, norm, ...")] = "",
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Begin nothing new after so many; default 240, interpreted 3600.", show_default=False
        ),
    ] = None,
    model: Annotated[bool, typer.Option(help="Compile the trained tiny model, too.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Check every Triton kernel against float64, time it beside the roofline, and compile the tiny model.

    Exit code 1: something is wrong, or the time was too short for all of it.
    """
    import torch

    from ..gpu_check import render, run
    from ..kernels.jit_triton import installed

    if not installed():
        raise ValueError(
            "triton is not installed: pip install triton, and nothing of it can be checked before"
        )
    if not run.with_triton(match):
        names = ", ".join(dict.fromkeys(op.name for op, _ in run.with_triton("")))
        raise ValueError(f"no op with a Triton kernel has {match!r} in its name; there are {names}")
    if seconds is None:
        seconds = run.INTERPRETED_SECONDS if interpret else run.SECONDS
    if interpret:
        made = run.interpreted(match, seconds, model)
    elif torch.cuda.is_available():
        told = Console(stderr=True)
        made = run.run("cuda", match, seconds, model, say=told.print)
    else:
        raise ValueError(
            f"torch {torch.__version__} sees no GPU on this machine; k3 gpu-check --interpret checks the "
            "kernels without one, k3 kernels compiles them for GPUs that are elsewhere"
        )
    if output is not None:
        output.write_text(json.dumps(made, indent=1) + "\n")
    if as_json:
        print(json.dumps(made))
    else:
        render.console().print(render.text(made), highlight=False, markup=False)
    return 0 if made["passed"] else 1
