"""What `k3 diff` writes: text, JSON, drawings, an HTML page, ONNX for Netron, and the results of a budget."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO

from ..graphdiff import render_text
from ..graphdiff.render_graph import RENDERERS
from .diff_costs import cost_rows, costs, priced, step_prices, total_rows
from .diff_inputs import Comparison
from .sizes import check_sizes, known_sizes


def rendered(
    found: list[Comparison], format: str, sizes: Mapping[str, int], stream: IO | None
) -> str | bytes:
    """The output; of text on a terminal everything is printed and nothing returned."""
    if sizes:
        check_sizes((side for one in found for side in priced(one)), sizes)
    if format == "text":
        return as_text(found, sizes, stream)
    found = [replace(one, diff=replace(one.diff, costs=costs(one, sizes))) for one in found]
    if format == "json":
        data = [one.diff.to_json() for one in found]
        return (
            json.dumps(data[0] if len(data) == 1 else {"schema": "k3diffs/1", "diffs": data}, indent=1) + "\n"
        )
    if format == "html":
        return as_page(found, sizes)
    if len(found) > 1:
        names = ", ".join(one.name for one in found)
        raise ValueError(f"--format {format} shows one graph, there are {len(found)}: {names}")
    (one,) = found
    if format == "onnx":
        from ..graphdiff.onnx_graph import diff_to_onnx

        return diff_to_onnx(one.diff.to_json()).SerializeToString()
    return RENDERERS[format](one.diff)


def as_page(found: list[Comparison], sizes: Mapping[str, int]) -> str:
    """One page for all graphs, each stage by stage where passes ran."""
    from ..graphdiff.render_html import html_of_several

    graphs = []
    for one in found:
        data = one.timeline.to_json() if one.stepwise else one.diff.to_json()
        if one.stepwise and one.ignore:
            told = [None, *(step for _, step, _ in render_text.steps(one.timeline, one.ignore))]
            changes = [step and {k: step.to_json()[k] for k in ("pairs", "changes")} for step in told]
            data["stages"] = [stage | {"delta": delta} for stage, delta in zip(data["stages"], changes)]
        if not one.stepwise:
            data["costs"] = dict(zip(("before", "after"), (side.to_json() for side in priced(one))))
        data |= {"generated": one.generated, "sizes": known_sizes(priced(one)[1], sizes)}
        graphs.append((one.name, one.times, data))
    return html_of_several(graphs)


def as_text(found: list[Comparison], sizes: Mapping[str, int], stream: IO | None) -> str:
    """Stage by stage where passes ran, else each diff; then the costs."""
    from rich.console import Console

    console = Console(file=stream) if stream else None
    rows = []
    for one in found:
        times = f" x{one.times}" if one.times > 1 else ""
        if one.stepwise:
            rows.append(
                render_text.timeline_text(one.timeline, one.times, list(step_prices(one, sizes)), one.ignore)
            )
        elif console is not None and console.is_terminal:
            render_text.show(console, one.diff, one.name + times if len(found) > 1 else "")
        else:
            rows.append((f"{one.name}{times}: " if len(found) > 1 else "") + render_text.text(one.diff))
        rows += [f"  {row}\n" for row in cost_rows(one, sizes)]
    rows += [f"{row}\n" for row in total_rows(found, sizes)]
    return "".join(rows)


def hold(
    found: list[Comparison], file: Path, junit: Path | None, sizes: Mapping[str, int], seconds: float
) -> int:
    """Hold every graph to the budget; 1 where a limit is broken."""
    from ..graphdiff.asserts import check, read_budget
    from ..graphdiff.junit import junit as xml

    budget = read_budget(file)
    given = {**budget.at, **sizes}
    if given:
        check_sizes((side for one in found for side in priced(one)), given)
    results = []
    for one in found:
        budget = replace(budget, at=known_sizes(priced(one)[1], given))
        head = f"{one.name}: " if len(found) > 1 else ""
        results += [replace(r, name=head + r.name) for r in check(budget, one.timeline, one.diff)]
    for result in results:
        print(
            f"{'ok  ' if result.ok else 'FAIL'} {result.name}"
            + ("" if result.ok else f"\n{indented(result.message)}")
        )
    if junit:
        junit.write_text(xml(results, file.name, seconds), encoding="utf-8")
    return 0 if all(result.ok for result in results) else 1


def indented(text: str) -> str:
    return "\n".join(f"     {line}" for line in text.splitlines())
