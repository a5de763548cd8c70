"""A dry run for people: a line a kind, the step, what was checked, and the graphs that say so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .run import Found
from .totals import CONTEXTS, COSTS, COUNTED, PASSES, Totals

COLUMNS = {  # heading -> measures that it adds up
    "row moves": ("rows",),
    "finalizes": ("finalizes",),
    "launches": ("launches",),
    "allocations": ("allocations",),
    "moved": ("bytes_read", "bytes_written"),
    "collectives": ("collectives",),
    "sent": ("collective_bytes",),
    "exports": ("exports",),
}
UNITS = {"GB": 10**9, "MB": 10**6, "kB": 10**3}
KNOWN = (*COUNTED, *COSTS, CONTEXTS)  # the other measures are ops that communicate


def text(found: Found, evidence: bool = True) -> str:
    """All of it. evidence: with digests of the graphs, seconds and memory, which differ from run to run."""
    asked = found.asked
    groups = f", context groups of {asked.dcp}" if asked.dcp > 1 else ""
    dtype = str(asked.dtype).removeprefix("torch.")
    rows = [
        f"{found.family}, {found.layers} layers in {dtype}, rank {asked.ranks[0]} of {asked.tp}{groups}",
        f"one step of {asked.mix}",
        "",
        *table(found),
        "",
        *words(found),
        "",
        *(line_of_check(one.what, one.expected, one.found) for one in found.checks),
        *([same_on(found)] if len(asked.ranks) > 1 else []),
    ]
    if evidence:
        memory = f"{found.peak_rss_bytes / 2**30:.2f} GiB"
        rows += ["", *graphs(found.parts), "", f"{found.seconds:.1f} s, {memory} at most"]
    return "\n".join(rows) + "\n"


def table(found: Found) -> Iterator[str]:
    """All layers of a kind a line, and the sum of the lines."""
    units = {heading: unit_of(found.step[0], measures) for heading, measures in COLUMNS.items()}
    lines = [["", "layers", *(f"{unit} {heading}".strip() for heading, unit in units.items())]]
    every = [(p.name, str(p.layers) if p.compiled else "-", p.before, p.after) for p in found.parts]
    for name, layers, *sides in [*every, ("the step", str(found.layers), *found.step)]:
        lines.append([name, layers, *(cell(*sides, COLUMNS[heading], units[heading]) for heading in COLUMNS)])
    widths = [max(map(len, column)) for column in zip(*lines)]
    for name, *cells in lines:
        right = [entry.rjust(width) for entry, width in zip(cells, widths[1:])]
        yield "  ".join([name.ljust(widths[0]), *right]).rstrip()


def unit_of(numbers: Mapping[str, int], measures: Sequence[str]) -> str:
    """The unit of a column of bytes, by its sum; none for counts."""
    if "bytes" not in measures[0]:
        return ""
    total = sum(numbers[m] for m in measures)
    return next((unit for unit, size in UNITS.items() if total >= size), "kB")


def cell(before: Mapping[str, int], after: Mapping[str, int], measures: Sequence[str], unit: str) -> str:
    """``552 -> 0``; once where nothing changes."""
    numbers = [sum(side[m] for m in measures) for side in (before, after)]
    old, new = (f"{n / UNITS[unit]:,.2f}" if unit and n else f"{n:,}" for n in numbers)
    return old if old == new else f"{old} -> {new}"


def words(found: Found) -> Iterator[str]:
    """What the columns mean, in the sums of the step."""
    before, after = found.step
    yield "row moves: gathers and scatters of token rows by attention; finalizes: gathers of experts' rows"
    yield f"other gathers and scatters: {after['embeddings']} of the embedding, {after['others']} more"
    for side, numbers in (("before", before), ("after", after)):
        direct = {name: count for name, count in sorted(numbers.items()) if name not in KNOWN}
        said = [f"{count} {name}" for name, count in direct.items()]
        if come := numbers.get(CONTEXTS):
            said.append(f"{come} of contexts that come to their queries")
        if inside := numbers["collectives"] - sum(direct.values()) - (come or 0):
            said.append(f"{inside} inside of {numbers['tails']} latent tails")
        yield f"collectives {side}: {', '.join(said) or 'none'}"
    for name in PASSES:
        applied = sum(part.applied[name] * part.layers for part in found.parts)
        missed = [(reason, part) for part in found.parts for reason in part.missed[name] if part.layers]
        yield f"{name}: {applied} applied, {sum(part.layers for _, part in missed)} missed"
        for reason in dict.fromkeys(reason for reason, _ in missed):
            yield f"  missed: {reason}"


def line_of_check(what: str, expected: int, counted: int) -> str:
    return f"{'ok   ' if expected == counted else 'WRONG'} {what}: {counted}" + (
        "" if expected == counted else f", expected {expected}"
    )


def same_on(found: Found) -> str:
    """Whether the ranks that were traced run the same graphs."""
    ranks = ", ".join(map(str, found.asked.ranks))
    if not found.strangers:
        return f"ok    ranks {ranks} run the same graphs of layers and make the same collectives"
    return "\n".join(f"WRONG {one}" for one in found.strangers)


def graphs(parts: Sequence[Totals]) -> Iterator[str]:
    """What was counted: digests of the graphs as captured, before the ATen passes, and at the end."""
    for part in parts:
        stages = dict.fromkeys(part.digests.values())
        yield f"graph of {part.name}: {' -> '.join(stages)}"
