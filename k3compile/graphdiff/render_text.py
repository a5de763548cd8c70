"""A diff or a timeline for people: a tree and a table of counts on a terminal, plain lines elsewhere.

21 nodes -> 18 nodes: 24 rewritten
  rewritten x4: aten.arange.start, aten.index_select.default -> aten.slice.Tensor
    - %index_select: f32[3, 4] = aten.index_select.default(%x, 0, %arange)
    + %slice_1: f32[3, 4] = aten.slice.Tensor(%x, 0, 2, 5)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from .diff import Diff, diff
from .folded import Unit, units
from .timeline import Timeline

if TYPE_CHECKING:
    from rich.console import Console

COLOURS = {"added": "green", "removed": "red", "rewritten": "yellow", "meta": "cyan", "moved": "magenta"}
LONGEST = 12  # lines of one replaced bit


def headline(found: Diff) -> str:
    """``21 nodes -> 18 nodes: 24 rewritten, 1 meta``"""
    counts = Counter(change.kind for change in found.changes)
    sizes = [len(snapshot["nodes"]) for snapshot in (found.before, found.after)]
    if found.same:
        return f"the same: {sizes[0]} nodes"
    said = ", ".join(f"{counts[kind]} {kind}" for kind in COLOURS if counts[kind])
    return f"{sizes[0]} nodes -> {sizes[1]} nodes: {said}"


def text(found: Diff) -> str:
    """The whole diff as lines, the same in every process."""
    rows = [headline(found)]
    for one in units(found):
        rows.append(f"  {title(one)}")
        rows += [f"    {row}" for row in shown(one)]
    return "\n".join(rows) + "\n"


def title(one: Unit) -> str:
    return f"{one.kind}{f' x{one.times}' if one.times > 1 else ''}: {one.title}"


def shown(one: Unit) -> list[str]:
    """The lines of a unit, a long one cut."""
    more = len(one.lines) - LONGEST
    return [*one.lines[:LONGEST], f"... {more} more"] if more > 1 else list(one.lines)


def steps(
    timeline: Timeline, ignore: Iterable[str] = ()
) -> Iterator[tuple[str, Diff | None, Mapping[str, int]]]:
    """(stage, what it changed, remarks by kind) of each; None where the graph was captured anew."""
    for old, new in pairwise(timeline.stages):
        anew = new.name.startswith("captured")
        remarks = Counter(r["kind"] for r in new.remarks)
        yield new.name, None if anew else diff(old.snapshot, new.snapshot, ignore), remarks


def timeline_text(
    timeline: Timeline, times: int = 1, prices: Sequence[str] = (), ignore: Iterable[str] = ()
) -> str:
    """Every stage of a timeline and what it changed.

    times: layers that are like it. prices: for each stage but the first, what it changed of the costs.
    ignore: attributes not to compare.
    """
    first = timeline.stages[0]
    head = f"{timeline.graph}{f' x{times}' if times > 1 else ''}"
    rows = [f"{head}: {len(first.snapshot['nodes'])} nodes {first.name}"]
    prices = prices or [""] * (len(timeline.stages) - 1)
    for (name, found, remarks), stage, price in zip(steps(timeline, ignore), timeline.stages[1:], prices):
        said = ", ".join(f"{count} {kind}" for kind, count in sorted(remarks.items()))
        if found is None:
            rows.append(f"  {name}: {len(stage.snapshot['nodes'])} nodes")
            continue
        words = [headline(found), *([said] if said else []), *([price] if price else [])]
        rows.append(f"  {name}: {'; '.join(words)}")
        rows += [f"  {row}" for row in text(found).splitlines()[1:]]
    return "\n".join(rows) + "\n"


def show(console: Console, found: Diff, heading: str = "") -> None:
    """Print a diff: a coloured tree and a table on a terminal, lines elsewhere."""
    if not console.is_terminal:
        lines = f"{heading}: {text(found)}" if heading else text(found)
        console.print(lines, end="", markup=False, highlight=False, soft_wrap=True)
        return
    from rich.text import Text
    from rich.tree import Tree

    tree = Tree(Text(f"{heading}: {headline(found)}" if heading else headline(found), "bold"))
    for one in units(found):
        branch = tree.add(Text(title(one), COLOURS[one.kind]))
        for row in shown(one):
            branch.add(Text(row, {"-": "red", "+": "green"}.get(row[0], "dim")))
    console.print(tree)
    if not found.same:
        console.print(table(found))


def table(found: Diff) -> Any:
    """Ops of which there are more or fewer."""
    from rich.table import Table

    rows = Table("op", "before", "after", box=None)
    for op, (old, new) in op_counts(found).items():
        rows.add_row(op, str(old), str(new))
    return rows


def op_counts(found: Diff) -> dict[str, tuple[int, int]]:
    """Calls of each op before and after, where these differ."""
    sides = [counted(s["nodes"]) for s in (found.before, found.after)]
    return {
        op: (sides[0][op], sides[1][op])
        for op in sorted(sides[0].keys() | sides[1].keys())
        if sides[0][op] != sides[1][op]
    }


def counted(nodes: Iterable[Mapping[str, Any]]) -> Counter[str]:
    return Counter(n["target"] for n in nodes if n["op"].startswith("call"))
