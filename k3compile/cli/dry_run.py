"""`k3 dry-run`: what the passes do to a model of any size on any number of ranks, without its weights.

k3 dry-run config.json --tp 8                       one mixed step on rank 0 of 8, before and after the passes
k3 dry-run config.json --tp 8 --ranks all           and all ranks must run the same graphs
k3 dry-run config.json --verify 0 --decode 256 --prefill 0 --json

Exit code 1 where an expected rewrite did not happen or ranks differ; --no-require only tells.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

DTypes = Literal["bfloat16", "float32", "float64"]


def dry_run(
    model: Annotated[Path, typer.Argument(help="A config.json, or the folder of a checkpoint.")],
    tp: Annotated[int, typer.Option(help="Ranks that share every layer.")] = 1,
    dcp: Annotated[int, typer.Option(help="Ranks that share the latents of a token.")] = 1,
    ranks: Annotated[str, typer.Option(help="Ranks to trace: all, or numbers such as 0,3,7.")] = "0",
    verify: Annotated[str, typer.Option(help="Verify requests of the step and rows of each: 3x8.")] = "3x8",
    decode: Annotated[int, typer.Option(help="Decodes of the step.")] = 8,
    prefill: Annotated[str, typer.Option(help="Prefills of the step and rows of each: 1x32.")] = "1x32",
    context: Annotated[int, typer.Option(help="Tokens that each request has seen before.")] = 4096,
    dtype: Annotated[DTypes, typer.Option(help="Of weights and activations.")] = "bfloat16",
    disable: Annotated[list[str] | None, typer.Option(help="Leave this pass out.")] = None,
    require: Annotated[bool, typer.Option(help="Exit code 1 where a rewrite is missing.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Compile every kind of layer for fake ranks; count launches, bytes, collectives of one step."""
    from ..options import pass_names, read_switches, unknown_names

    read_switches()  # a mistake in them is told here, not by a compile that fails
    if wrong := unknown_names(disable or [], pass_names()):
        raise ValueError(f"--disable names no pass: {wrong}; passes: {', '.join(pass_names())}")

    import torch

    from ..dry_run import run
    from ..dry_run.mix import Mix, rows_of
    from ..dry_run.text import text
    from ..runtime.config import K3Config

    mix = Mix(rows_of(verify, "--verify"), decode, rows_of(prefill, "--prefill"), context)
    asked = run.DryRun(tp, dcp, chosen(ranks, tp), mix, getattr(torch, dtype), tuple(disable or ()))
    found = run.dry_run(K3Config.from_file(model), asked)
    print(json.dumps(found.to_json(), indent=2) if as_json else text(found), end="\n" if as_json else "")
    return 0 if found.ok or not require else 1


def chosen(ranks: str, tp: int) -> tuple[int, ...]:
    """``all``, or ``0,3,7``. Raises ValueError for anything else."""
    if ranks == "all":
        return tuple(range(tp))
    parts = [part.strip() for part in ranks.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"--ranks is {ranks!r}; expected all, or numbers such as 0,3,7")
    return tuple(dict.fromkeys(map(int, parts)))
