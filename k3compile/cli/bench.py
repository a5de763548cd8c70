"""`k3 bench`: ratios and shares of this machine's limits, measured in one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

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
    mode: Annotated[list[str] | None, typer.Option(help="eager, inductor, plain, k3; repeat.")] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 512,
    decode: Annotated[int, typer.Option(help="Tokens of one decode round.")] = 16,
    rounds: Annotated[int, typer.Option(help="Rounds; medians and quartiles are over these.")] = 5,
    resident: Annotated[str, typer.Option(help="Of the matrices in memory: float32, bfloat16.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prefill, decode, TTFT, peak memory and host time per layer: eager, Inductor, plain and k3."""
    from ..bench import model as bench
    from ..bench import render

    typer.echo("measuring; the table comes at the end, after minutes", err=True)
    try:
        limits, results = bench.bench(
            presets or ["tiny", "small"], mode or bench.MODES, prompt, decode, rounds, resident
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


@app.command("compile")
def compile_(
    folder: Annotated[
        str | None, typer.Argument(help="A folder with config.json; no weights are read.")
    ] = None,
    preset: Annotated[str, typer.Option(help="A preset, where no folder is given.")] = "tiny",
    rounds: Annotated[
        int, typer.Option(help="Rounds of a cold and a warm start; medians are over them.")
    ] = 3,
    max_pass_share: Annotated[float | None, typer.Option(help="Fail above this: 0.1 is ten percent.")] = None,
    max_warm_ratio: Annotated[
        float | None, typer.Option(help="Fail above this: 1.5 is half as long again.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Trace, passes, Inductor; then a warm start in a second process. Exit code 1: over a given budget."""
    from ..bench import compile as bench

    typer.echo("each round compiles the model from nothing, which takes a minute or more", err=True)
    try:
        result = bench.bench(folder or preset, rounds, say=lambda line: typer.echo(line, err=True))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    over = result.over_budget(max_pass_share, max_warm_ratio)
    if as_json:
        print(json.dumps(result.to_json() | {"over_budget": over}, indent=2))
    else:
        console = Console(width=140)
        console.print(bench.table(result))
        console.print(
            "\n".join(
                [f"passes / cold {result.pass_share:.1%}, warm / trace {result.warm_ratio:.2f}x", *over]
            )
        )
    return 1 if over else 0


@app.command("passes")
def passes(
    preset: Annotated[str, typer.Argument(help="A preset or a checkpoint directory.")] = "tiny",
    inner: Annotated[str, typer.Option(help="aot_eager is quick; inductor compiles every variant.")] = (
        "aot_eager"
    ),
    without: Annotated[
        list[str] | None, typer.Option(help="A pass to leave out; repeat, default all.")
    ] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 256,
    decode: Annotated[int, typer.Option(help="Tokens of one decode round.")] = 16,
    rounds: Annotated[int, typer.Option(help="Rounds; medians and quartiles are over these.")] = 9,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What each pass is worth here: the model with all of them, and without each one."""
    from ..bench import passes as bench
    from ..options import CompileOptions

    try:
        CompileOptions(inner=inner)
        typer.echo("measuring; the table comes at the end, after minutes", err=True)
        result = bench.bench(preset, inner, prompt, decode, rounds, without or ())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    show(as_json, result.to_json(), bench.table(result))


@app.command("kernels")
def kernels(
    op: Annotated[list[str] | None, typer.Option(help="An op; repeat, default all with a cell.")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds; medians are over these.")] = 5,
    scale: Annotated[float, typer.Option(help="Of the working sets; 1 is four times the last cache.")] = 1.0,
    plot: Annotated[Path | None, typer.Option(help="Write a picture of the shares, as SVG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Every op with several implementations here: GB/s and GFLOP/s beside this machine's limits."""
    from ..bench import kernels as bench
    from ..bench.plot import svg
    from ..kernels.op import OPS

    try:
        result = bench.bench(rounds, scale, op or ())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if plot is not None:
        plot.write_text(svg(result, frozenset(name for op in OPS.values() for name in op.implementations)))
    show(as_json, result.to_json(), bench.table(result))


@app.command("hf")
def hf(
    size: Annotated[str, typer.Option(help="tiny, small or medium: random weights either way.")] = "tiny",
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 128,
    decode: Annotated[int, typer.Option(help="Tokens of one decode round.")] = 16,
    rounds: Annotated[int, typer.Option(help="Rounds; medians are over these.")] = 5,
    inductor: Annotated[
        bool, typer.Option(help="Plain Inductor takes minutes: their loop is unrolled.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """transformers' Kimi-Linear: eager, plain Inductor, and adopted with k3."""
    from ..bench import hf as bench

    try:
        result = bench.bench(size, prompt, decode, rounds, inductor, lambda line: typer.echo(line, err=True))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        print(json.dumps(result.to_json(), indent=2))
        return
    console = Console(width=140)
    console.print(bench.table(result))
    console.print(bench.graphs_line(result))


@app.command("speculate")
def speculate(
    checkpoint: Annotated[Path | None, typer.Argument(help="A checkpoint; default: the tiny one.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Folder of a DSpark draft; default: its draft/.")] = None,
    num_drafts: Annotated[int, typer.Option(help="Drafts of a request in a step.")] = 7,
    level: Annotated[
        list[int] | None, typer.Option(help="Requests at once; repeat, default 1, 4, 16.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="The most tokens of an answer.")] = 64,
    rounds: Annotated[int, typer.Option(help="Rounds; medians and quartiles are over these.")] = 5,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    verification: Annotated[str, typer.Option(help="block or standard, above temperature 0.")] = "block",
    adaptive_verification: Annotated[bool, typer.Option(help="Verify only drafts that pay.")] = False,
    prompts: Annotated[Path | None, typer.Option(help="File with a prompt on each line.")] = None,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Compile first.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Drafts: accepted length, acceptance by position, and throughput with them against without."""
    from ..bench import speculate as bench
    from .loading import or_shipped

    texts = [] if prompts is None else [line for line in prompts.read_text().splitlines() if line]
    checkpoint = or_shipped(checkpoint)
    typer.echo("measuring; the table comes at the end, after minutes", err=True)
    result = bench.bench(
        checkpoint,
        texts,
        num_drafts=num_drafts,
        draft=draft,
        levels=level or bench.LEVELS,
        tokens=tokens,
        rounds=rounds,
        temperature=temperature,
        compiled=compiled,
        verification=verification,
        adaptive_verification=adaptive_verification,
    )
    show(as_json, result.to_json(), bench.table(result))


@app.command("prefix")
def prefix(
    preset: Annotated[str, typer.Argument(help="A preset or a checkpoint directory.")] = "tiny",
    prompt: Annotated[int, typer.Option(help="Tokens of the first turn.")] = 8000,
    turns: Annotated[int, typer.Option(help="Turns of the conversation.")] = 3,
    more: Annotated[int, typer.Option(help="Tokens that each later turn adds to the answer.")] = 100,
    reply: Annotated[int, typer.Option(help="Tokens of an answer.")] = 24,
    rounds: Annotated[int, typer.Option(help="Rounds; medians and quartiles are over these.")] = 3,
    inner: Annotated[str, typer.Option(help="aot_eager is quick; inductor is what serves.")] = "aot_eager",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """A conversation without a prefix cache, with it, and with states written inside the pass."""
    from ..bench import prefix as bench

    typer.echo("measuring; the table comes at the end, after minutes", err=True)
    result = bench.bench(
        preset, prompt=prompt, turns=turns, more=more, reply=reply, rounds=rounds, inner=inner
    )
    show(as_json, result.to_json(), bench.table(result))


@app.command("recall")
def recall(
    checkpoint: Annotated[Path | None, typer.Argument(help="A folder; default: the tiny model.")] = None,
    problems: Annotated[int, typer.Option(help="Problems of each task.")] = 50,
    seed: Annotated[int, typer.Option(help="Which problems.")] = 0,
    level: Annotated[int, typer.Option(help="Requests at once.")] = 16,
    num_drafts: Annotated[int, typer.Option(help="Drafts a request, 0 to 16.")] = 0,
    prefix_cache: Annotated[bool, typer.Option(help="Keep and find prefixes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What share of problems with one right answer a checkpoint answers right."""
    from ..bench import recall as bench
    from .loading import or_shipped

    typer.echo("answering; the table comes at the end", err=True)
    settings = {"max_num_seqs": level, "num_drafts": num_drafts, "prefix_cache": prefix_cache}
    shares = bench.bench(or_shipped(checkpoint), problems, seed, settings)
    show(as_json, shares, bench.table(shares, problems))


def show(as_json: bool, data: dict, table: Table) -> None:
    """Print a result for programs or for people."""
    if as_json:
        print(json.dumps(data, indent=2))
    else:
        Console(width=140).print(table)
