"""Recognises an index tensor that is ``arange(start, end)`` by the way the graph builds it.

    i = arange(s, e)        [s, e)          j = split(arange(n), [a, n - a])[1]     [a, n)
    i[1:4] + k              [s + 1 + k, s + 4 + k)       cat of [a, b) and [b, c)   [a, c)
    i[arange(1, 4)]         [s + 1, s + 4)               i[:, None].squeeze(1)      [s, e)

Only the start is computed here; the length is the index's own size. Anything else is refused with where the
index comes from. An annotated input is an arange too, in the body made for it (:mod:`multi_version`).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
from k3compile.passes.graph import arguments, op_name, tensor, value
from k3compile.passes.prover import Prover, Size, expr
from k3compile.passes.row_tables import run_behind, step
from torch import fx

aten, prims = torch.ops.aten, torch.ops.prims
INT32_ROWS = 2**31


class Range(NamedTuple):
    """The rows [start, start + length), and the aten calls that built them, innermost last."""

    start: Size
    length: Size
    built_by: tuple[str, ...]

    @property
    def end(self) -> Size:
        """One past the last row."""
        return self.start + self.length

    def __str__(self) -> str:
        return f"[{expr(self.start)}, {expr(self.end)})"


Answer = Range | str  # the range, or why there is none
Rule = Callable[[fx.Node, Prover], Answer]


def range_of(index: fx.Node, prover: Prover) -> Answer:
    """The range ``index`` holds in every run, or the reason why none is proven."""
    rule = RULES.get(index.target) if index.op == "call_function" else None
    found = tensor(index)
    if rule is None or found is None:
        return f"index comes from {origin(index)}"
    if found.dim() != 1:
        return f"the index has {found.dim()} dimensions"
    answer = rule(index, prover)
    if isinstance(answer, str):
        return answer
    if found.dtype == torch.int32 and not prover.le(answer.start + found.shape[0], INT32_ROWS):
        return "passes through torch.int32, which may be too narrow"
    if found.dtype not in (torch.int64, torch.int32):
        return f"passes through {found.dtype}"
    return Range(answer.start, found.shape[0], (*answer.built_by, op_name(index)))


def origin(index: fx.Node) -> str:
    """What a person would say the index comes from."""
    while index.target in SAME_ORIGIN or RULES.get(index.target) in (same_values, part, piece):
        index = index.args[0]
    kinds = {"placeholder": "a graph input", "get_attr": "a constant"}
    return kinds.get(index.op) or op_name(index)


def from_arange(node: fx.Node, prover: Prover) -> Answer:
    named = {"start": 0, "step": 1, **arguments(node)}
    start, step = value(named["start"]), value(named["step"])
    if not isinstance(start, (int, torch.SymInt)) or isinstance(step, (float, torch.SymFloat)):
        return "arange of floating point numbers"
    if not prover.equal(step, 1):
        return f"step is {step}"
    return Range(start, 0, ())


def same_values(node: fx.Node, prover: Prover) -> Answer:
    before, axis = step(node, 0)
    run = run_behind(before, axis) if before is not None else None
    if run is None:
        root = origin(node)  # a table of indices; one made of a range need not give it back in order
        return f"index comes from {op_name(node) if root in ('aten.arange', 'prims.iota') else root}"
    answer = range_of(run, prover)
    if isinstance(answer, Range) and not prover.equal(answer.length, tensor(node).shape[0]):
        return f"index comes from {op_name(node)}"  # expand repeats its one row
    return answer


def nested(node: fx.Node, prover: Prover) -> Answer:
    """The rows of a range that another range picks."""
    named = arguments(node)
    picked = named["index"] if "index" in named else named["indices"][0]
    outer = range_of(named["self"], prover)
    inner = range_of(picked, prover) if isinstance(outer, Range) else outer
    if isinstance(inner, str):
        return inner
    if not prover.le(0, inner.start) or not prover.le(inner.end, outer.length):
        return "index comes from a range of another that may reach past its end"
    return outer._replace(start=outer.start + inner.start)


def shifted(sign: int) -> Rule:
    def rule(node: fx.Node, prover: Prover) -> Answer:
        named = arguments(node)
        by = value(named["other"])
        if not isinstance(by, (int, torch.SymInt)) or named["alpha"] != 1:
            return f"index comes from {op_name(node)}"
        answer = range_of(named["self"], prover)
        return answer if isinstance(answer, str) else answer._replace(start=answer.start + sign * by)

    return rule


def part(node: fx.Node, prover: Prover) -> Answer:
    named = arguments(node)
    answer = range_of(named["self"], prover)
    if isinstance(answer, str):
        return answer
    first, step = value(named["start"]), value(named["step"])
    first = 0 if first is None else first
    if not prover.equal(step, 1):
        return f"step is {step}"
    if not prover.le(0, first) or not prover.le(first, answer.length):
        return "index comes from a slice whose start may be clamped"
    return answer._replace(start=answer.start + first)


def piece(node: fx.Node, prover: Prover) -> Answer:
    whole, place = node.args
    if not isinstance(whole, fx.Node) or whole.target not in SPLITS:
        return f"index comes from {origin(node)}"
    answer = range_of(whole.args[0], prover)
    if isinstance(answer, str):
        return answer
    before = [t.shape[0] for t in value(whole)[:place]]
    return answer._replace(start=answer.start + sum(before))


def joined(node: fx.Node, prover: Prover) -> Answer:
    answers = [range_of(one, prover) for one in node.args[0]]
    for answer in answers:
        if isinstance(answer, str):
            return answer
    for left, right in itertools.pairwise(answers):
        if not prover.equal(left.end, right.start):
            return "the class changes more than once: its rows are " + " and ".join(map(str, answers))
    return answers[0]


SAME_ORIGIN = {  # looked through to say where an index comes from, not to prove anything
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.select.int,
    aten.permute.default,
    aten.clamp.default,
    aten.clamp_min.default,
    aten.maximum.default,
    aten.remainder.Scalar,
}
SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unsafe_split.Tensor}
RULES: dict[object, Rule] = {
    **dict.fromkeys((aten.arange.default, aten.arange.start, aten.arange.start_step), from_arange),
    prims.iota.default: from_arange,
    **dict.fromkeys(
        (
            aten.clone.default,
            aten.alias.default,
            aten.detach.default,
            aten.contiguous.default,
            aten.lift_fresh_copy.default,
            aten._to_copy.default,
            aten.view.default,
            aten.reshape.default,
            aten._unsafe_view.default,
            aten.expand.default,
            prims.convert_element_type.default,
            prims.device_put.default,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
        ),
        same_values,
    ),
    aten.add.Tensor: shifted(1),
    aten.add.Scalar: shifted(1),
    aten.sub.Tensor: shifted(-1),
    aten.sub.Scalar: shifted(-1),
    aten.slice.Tensor: part,
    operator.getitem: piece,
    aten.cat.default: joined,
    **dict.fromkeys((aten.index_select.default, aten.index.Tensor, aten._unsafe_index.Tensor), nested),
}
