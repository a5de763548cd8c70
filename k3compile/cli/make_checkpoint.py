"""`k3 make-checkpoint DIR`: random weights in the released layout, so that nothing has to be downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def make_checkpoint(
    directory: Annotated[Path, typer.Argument(help="A new or empty folder, or one to complete.")],
    preset: Annotated[str, typer.Option(help="tiny, small or tiny-linear.")] = "tiny",
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 0,
    draft: Annotated[bool, typer.Option(help="A DSpark draft too, in DIRECTORY/draft (tiny).")] = False,
) -> int:
    """Write a checkpoint of a preset; a folder that was begun is completed."""
    from ..runtime import checkpoint
    from ..runtime.speculate import dspark_checkpoint

    console = Console(highlight=False)

    def report(line: str) -> None:
        console.print(line, markup=False)

    if draft:
        dspark_checkpoint.check_preset(preset)
    checkpoint.make_checkpoint(directory, preset, seed, report=report)
    if draft:
        dspark_checkpoint.make_draft(directory, report)
    return 0
