"""`k3 bench`: ratios and shares of this machine's limits, measured in one run."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    help="Measure here, alone on the machine; every claim is a ratio within one run.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def verbs() -> None:
    """One verb a benchmark."""


@app.command("model")
def model(
    presets: Annotated[list[str] | None, typer.Argument(help="Presets or checkpoint directories.")] = None,
    mode: Annotated[list[str] | None, typer.Option(help="eager, inductor, k3; repeat for several.")] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 512,
    decode: Annotated[int, typer.Option(help="Tokens of one decode round.")] = 16,
    rounds: Annotated[int, typer.Option(help="Rounds; medians and quartiles are over these.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prefill, decode, TTFT, peak memory and host time per layer: eager, plain Inductor and k3."""
    from ..bench import model as bench
    from ..bench import render

    typer.echo("measuring; the table comes at the end, after minutes", err=True)
    try:
        limits, results = bench.bench(
            presets or ["tiny", "small"], mode or bench.MODES, prompt, decode, rounds
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        print(json.dumps(render.as_json(limits, results), indent=2))
        return
    console = Console(width=180)
    console.print(render.heading(limits))
    for result in results:
        console.print(render.table(limits, result))
    console.print(
        "decode reads the weights as they are resident; host: one token on tiny widths, by kind of layer"
    )
