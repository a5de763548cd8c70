"""A plan for people: what is printed from :func:`.report.as_values`, in at most 100 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

GB, MB = 10**9, 10**6
WIDTH = 100


def show(console: Console, values: dict[str, Any]) -> None:
    """Print all of it."""
    console.print(headline(values))
    for misfit in values["misfits"]:
        console.print(f"  {misfit}", style="red")
    if values["changes"]:
        console.print("\nany one of these would make it fit")
        for change in values["changes"]:
            console.print(f"  {change_line(change)}")
    elif not values["fits"]:
        console.print("\nno change of one setting, or of one beside the number of ranks, would make it fit")
    if values["weights"]:
        console.print()
        console.print(memory_table(values))
    if "pools" in values:
        for title, lines in (("pools of a rank", pool_lines(values)), ("a step", step_lines(values))):
            console.print(f"\n{title}")
            for line in lines:
                console.print(f"  {line}")
    if "requests" in values:
        console.print()
        console.print(request_table(values))
        console.print("\nserve it with")
        console.print("\n".join(wrapped(values["serve"])), soft_wrap=True)


def headline(values: dict[str, Any]) -> Text:
    """Yes or no, of what on what."""
    nodes = f" on {values['nodes']} nodes" if values["nodes"] > 1 else ""
    draft = " with its draft" if values["draft"] else ""
    text = Text(f"{values['model']}{draft}, {values['dtype']}, ")
    text.append(
        f"on {values['tp']} x {values['gpu']['name']}{nodes}, tp {values['tp']}, dcp {values['dcp']}: "
    )
    return text.append(*(("fits", "bold green") if values["fits"] else ("does not fit", "bold red")))


def change_line(change: dict[str, Any]) -> str:
    """A change as flags, and what it gives."""
    flags = " ".join(flag(name, value) for name, value in change["settings"].items())
    nodes = f", {change['nodes']} nodes" if "tp" in change["settings"] and change["nodes"] > 1 else ""
    return f"{flags:<36} then pages for {change['tokens']:,} tokens{nodes}"


def flag(name: str, value: int | bool) -> str:
    """--name value, or a feature to add."""
    return f"--features ...,{name}" if isinstance(value, bool) else f"--{name.replace('_', '-')} {value}"


def memory_table(values: dict[str, Any]) -> Table:
    """Where a rank's memory goes."""
    memory, reserve = values["memory"], values["memory"]["reserve"]
    unit, scale = ("GB", GB) if memory["weights"] >= GB else ("MB", MB)

    def figures(*sizes: int) -> list[str]:
        return [figure(size / scale) for size in sizes]

    table = Table("memory of a rank", box=None, pad_edge=False)
    for title in (unit, "of all", "held by"):
        table.add_column(title, justify="left" if title == "held by" else "right")
    for one in values["weights"]:
        who = holders(one["copies"], values["tp"])
        table.add_row(f"  {one['kind']}", *figures(one["rank"], one["whole"]), who)
    whole = sum(one["whole"] for one in values["weights"])
    table.add_row("weights", *figures(memory["weights"], whole), style="bold")
    parts = f"libraries {text_of(reserve['fixed'])}"
    if reserve["activations"]:
        rows = values["budget"]["max_num_batched_tokens"]
        parts += f", {rows:,} rows {text_of(reserve['activations'])}, logits {text_of(reserve['logits'])}"
    table.add_row("reserve", *figures(reserve["total"]), "", parts, style="bold")
    if "pools" in values:
        table.add_row("pools", *figures(memory["pools"]), style="bold")
    table.add_row("left" if memory["free"] >= 0 else "missing", *figures(abs(memory["free"])), style="bold")
    share = f"{memory['usable_share']:.0%} of {text_of(values['gpu']['memory'])}: {values['gpu']['source']}"
    table.add_row("planned with", *figures(memory["usable"]), "", share, style="bold")
    return table


def holders(copies: float, ranks: int) -> str:
    """Who has a kind of weights."""
    if ranks == 1:
        return "the one rank"
    if copies <= 1.005:
        return "dealt out"
    return "every rank" if copies >= ranks - 0.005 else f"dealt out but for a part: {copies:.2f} copies"


def pool_lines(values: dict[str, Any]) -> Iterator[str]:
    """What the pools hold."""
    pools, block, budget = values["pools"], values["block"], values["budget"]
    requests = f"{budget['max_num_seqs']:,} requests"
    each = "" if pools["slots_per_request"] == 1 else f" of {pools['slots_per_request']}"
    yield f"{pools['slots']:,} state slots for {requests}{each}, {text_of(pools['slot_bytes'])} each"
    if pools["record_slots"]:
        rows = budget["num_drafts"] + 1
        yield f"records of {rows} rows for each of them, {text_of(pools['record_bytes'])}"
    if block["tokens"]:
        yield f"{pools['checkpoints']:,} slots for states of prefixes, one every {block['tokens']:,} tokens"
        yield (
            f"  block: {block['state_bytes']:,.0f} B of state / {block['token_bytes']:,.0f} B a token, "
            f"in steps of {block['alignment']} -> {block['tokens']:,}, {block['padding']:.1%} padding"
        )
    size = f"{pools['page_size']} tokens, {text_of(pools['page_bytes'])} each"
    yield f"{pools['pages']:,} pages of {size}: {pools['tokens']:,} tokens"
    yield f"the longest request: {pools['max_model_len']:,} tokens"


def step_lines(values: dict[str, Any]) -> Iterator[str]:
    """Budget, collectives, bounds."""
    budget, sums, most = values["budget"], values["collectives"], values["bounds"]
    yield (
        f"{budget['max_num_batched_tokens']:,} rows; a prompt alone gets {budget['alone']:,}, "
        f"{budget['max_num_seqs']:,} requests share {max(budget['full'], 0):,}"
    )
    if budget["num_drafts"]:
        yield (
            f"{budget['num_drafts']} drafts: {budget['row_charge']} rows of a step beside each request's "
            f"own, {budget['draft_rows']} of {budget['draft_limit']:,} rows of the draft's pass"
        )
    if budget["max_active"] < budget["max_num_seqs"]:
        yield f"at most {budget['max_active']:,} requests run at once: a step has no row for more"
    yield f"{sums['all_reduces']} all-reduces ({text_of(sums['row_bytes'])} a row) and 1 all-gather of logits"
    if dealt := sums["all_to_alls"]:
        groups = f"in groups of {values['dcp']}, more for long prompts"
        yield f"{dealt} all-gathers and {dealt} all-to-alls {groups}"
    yield (
        f"bounds: one token reads {text_of(most['token_bytes'])} a rank, at least "
        f"{most['token_seconds'] * 1e3:.2g} ms; prompts at most {most['prompt_rate']:,.0f} tokens/s"
    )


def request_table(values: dict[str, Any]) -> Table:
    """Lengths against numbers of requests."""
    table = Table("requests that fit whole", box=None, pad_edge=False)
    for title in ("as planned", "with --max-num-seqs for this length"):
        table.add_column(title, justify="right")
    for one in values["requests"]:
        most = "" if one["most"] is None else f"{one['most']:,}"
        table.add_row(f"  of {one['context']:,} tokens", f"{one['requests']:,}", most)
    return table


def wrapped(pieces: list[str]) -> list[str]:
    """A command over several lines, as a shell takes it."""
    lines = ["  " + pieces[0]]
    for piece in pieces[1:]:
        if len(lines[-1]) + len(piece) + 3 > WIDTH:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {piece}"
    return lines


def text_of(size: float) -> str:
    """With its unit."""
    unit, scale = next(((u, n) for u, n in (("GB", GB), ("MB", MB), ("KB", 1000)) if size >= n), ("B", 1))
    return f"{size:,.0f} B" if scale == 1 else f"{figure(size / scale)} {unit}"


def figure(value: float) -> str:
    """Small ones with more digits."""
    return f"{value:,.2f}" if value >= 0.1 or value == 0 else f"{value:.3f}"
