"""Picks, at each call, the body of a graph that fits what was promised about its index inputs.

    every index of the ranges body annotated and not written since     ranges body, given the first rows
    otherwise                                                          generic body

The choice reads a table on the host (:mod:`annotations`) and no value of an index, so that nothing waits for
a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .annotations import in_use, range_promised, was_annotated
from .passes.graph import fake_mode_of
from .passes.multi_version import RangeInput, use_ranges
from .passes.runner import Context
from .report import Report

Body = Callable[..., Any]
GAP = 10_000  # more sizes than the generic body of a graph will name


def worth_a_body(inputs: Sequence[RangeInput], args: Sequence[Any]) -> list[RangeInput]:
    """Which of a graph's index inputs its ranges body should take for ranges; none: no such body.

    args: those of the call that compiles. Inputs that were annotated before it; where none was but this
    process annotates, all of them.
    """
    known = [one for one in inputs if was_annotated(args[one.position])]
    return known or (list(inputs) if in_use() else [])


def starts_of(indices: Sequence[RangeInput], args: Sequence[Any]) -> torch.Tensor | None:
    """The first row of each index, CPU int64 [len(indices)]; None unless all are promised.

    An empty range lies at row 0, wherever it was said to be: it reads nothing.
    """
    found = [range_promised(args[one.position]) for one in indices]
    if any(rows is None for rows in found):
        return None
    return torch.tensor([0 if start == end else start for start, end in found], dtype=torch.int64)


def symbols_made(gm: fx.GraphModule) -> int:
    """How many data-dependent sizes the compile of a Dynamo graph has named so far."""
    mode = fake_mode_of(gm.graph)
    return mode.shape_env.unbacked_symint_counter if mode is not None and mode.shape_env is not None else 0


def use_ranges_of(
    indices: Sequence[RangeInput], gm: fx.GraphModule, args: Sequence[Any], ctx: Context, made: int
) -> torch.Tensor:
    """Make ``gm`` the ranges body; returns first rows to compile it with, those of ``args`` if promised.

    made: sizes named before the generic body was compiled. A cache that has that body names none for it, so
    those of this one start behind a gap: its text, which is what caches look up, is the same either way.
    """
    mode = fake_mode_of(gm.graph)
    ctx = replace(ctx, fake_mode=mode, extra_inputs=[])
    if mode is not None and mode.shape_env is not None:
        assert mode.shape_env.unbacked_symint_counter < made + GAP, "the generic body names more sizes"
        mode.shape_env.unbacked_symint_counter = made + GAP
    use_ranges(gm, indices, ctx)
    promised = starts_of(indices, args)
    return ctx.extra_inputs[0].example if promised is None else promised


def note(indices: Sequence[RangeInput]) -> str:
    """What the report says about a graph with two bodies."""
    names = ", ".join(one.name for one in indices)
    return f"two bodies: one for calls with {names} annotated as ranges, one for any index"


def completed(made: Report, found: Report | None) -> Report:
    """``made``, with what the stored report says of a body for which a cache answered and no pass ran."""
    if found is None:
        return made
    ran = {record.body for record in made.records}
    more = tuple(record for record in found.records if record.body and record.body not in ran)
    graphs = {**dict(found.graphs), **dict(made.graphs)}
    sizes = {**found.sizes, **made.sizes}
    return replace(made, records=(*made.records, *more), graphs=tuple(graphs.items()), sizes=sizes)


def pick(generic: Body, ranges: Body, indices: Sequence[RangeInput]) -> Body:
    """Both bodies as one function of the graph's inputs; ``ranges`` takes the first rows after them."""

    def call(*args: Any) -> Any:
        starts = starts_of(indices, args)
        return generic(*args) if starts is None else ranges(*args, starts)

    return call


def comparing(body: Body, indices: Sequence[RangeInput]) -> Body:
    """``body``, which first compares what was promised with the values: for finding a wrong promise."""

    def call(*args: Any) -> Any:
        for one in indices:
            compare(one.name, args[one.position])
        return body(*args)

    return call


def compare(name: str, index: Any) -> None:
    """Raise ValueError where ``index`` does not hold the range it was annotated with."""
    rows = range_promised(index)
    if rows is None:
        return
    wrong = (index != torch.arange(*rows, dtype=index.dtype, device=index.device)).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise ValueError(
            f"{name} was annotated as the rows [{rows[0]}, {rows[1]}), but element {at} is {int(index[at])} "
            f"and not {rows[0] + at}: annotate what it holds, or do not annotate it"
        )
