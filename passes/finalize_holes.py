"""What an index of picked rows does with -1: which numbers are read, and which test tells a hole.

index_select(rows, 0, clamp(idx, min=0)), where(idx >= 0, ..., 0)      raw idx, read clamp(idx)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from k3compile.passes.finalize_axes import Places, flat, follow, is_index_cast
from k3compile.passes.finalize_terms import Leaf, Unclear, is_zero, negates
from k3compile.passes.graph import arguments, tensor
from k3compile.passes.prover import Prover
from torch import fx

aten, prims, k3 = torch.ops.aten, torch.ops.prims, torch.ops.k3
SIGN = {  # test -> (bound, whether it is true for a row that is there)
    aten.ge.Scalar: (0, True),
    aten.gt.Scalar: (-1, True),
    aten.lt.Scalar: (0, False),
    aten.le.Scalar: (-1, False),
    aten.ne.Scalar: (-1, True),
    aten.eq.Scalar: (-1, False),
}
ONLY_MINUS_ONE = (aten.ne.Scalar, aten.eq.Scalar)
EXPERTS = (k3.experts_unfinalized.default, k3.experts_unfinalized_dense.default)
NEVER_NEGATIVE = (aten.arange.default, prims.iota.default, aten.argsort.default)


@dataclass(frozen=True)
class Hole:
    """raw: the index before it was clamped, with places ``at`` in it. read: as rows are picked by it.

    marked: the index with its negative numbers. It and ``read`` are in the order in which rows are picked,
    as far back as that order goes; marked is None where it begins behind the clamp.
    """

    raw: fx.Node | None
    read: fx.Node | None
    marked: fx.Node | None = None
    at: Places = ()
    never_negative: bool = False


def index_base(rows: Leaf, prover: Prover) -> Hole:
    """Follow the index of picked rows back through casts, views and a clamp at zero."""
    if rows.index is None:
        return Hole(None, None)
    order = flat(rows.index_at)
    raw, at, _ = follow(rows.index, rows.index_at, prover, is_index_cast)
    read = marked = raw if flat(at) == order else rows.index
    clamped = False
    while (inner := unclamped(raw)) is not None and alike_in_size(inner, raw, prover):
        clamped, marked = True, inner if flat(at) == order else None
        raw, at, _ = follow(inner, at, prover, is_index_cast)
        marked = raw if flat(at) == order else marked
    return Hole(raw, read, marked, at, clamped or never_negative(raw))


def alike_in_size(one: fx.Node, other: fx.Node, prover: Prover) -> bool:
    """Whether neither was broadcast to the other."""
    sizes = tensor(one).shape, tensor(other).shape
    return len(sizes[0]) == len(sizes[1]) and all(map(prover.equal, *sizes))


def unclamped(node: fx.Node) -> fx.Node | None:
    """x of clamp(x, min=0), relu(x) and where(x >= 0, x, 0); None for anything else."""
    if node.target is aten.clamp_min.default and node.args[1] == 0:
        return node.args[0]
    if node.target is aten.clamp.default:
        named = arguments(node)
        return named["self"] if named["min"] == 0 and named["max"] is None else None
    if node.target is aten.relu.default:
        return node.args[0]
    if node.target is aten.where.self and node.args[0].target in SIGN and len(node.args) == 3:
        test, one, other = node.args
        bound, there = SIGN[test.target]
        kept, dropped = (one, other) if there else (other, one)
        same = test.args[0] is kept and test.args[1] == bound and test.target not in ONLY_MINUS_ONE
        return kept if same and is_zero(dropped) else None
    return None


def never_negative(node: fx.Node) -> bool:
    """Whether a tensor of numbers has none below zero: it counts, or says where sorted values stood."""
    if node.target is operator.getitem and node.args[1] == 1:
        return node.args[0].target in (aten.sort.default, aten.sort.stable, aten.topk.default)
    return node.target in NEVER_NEGATIVE


def sign_test(node: fx.Node, at: Places, hole: Hole, prover: Prover) -> bool | None:
    """True where ``node`` at ``at`` holds for rows that are there, False for holes; None: another thing.

    Raises Unclear for a test that only means this for indices of at least -1 where that is not known.
    """
    node, at, _ = follow(node, at, prover)
    there = True
    while negates(node):
        node, at, _ = follow(node.args[0], at, prover)
        there = not there
    if node.target not in SIGN or hole.raw is None:
        return None
    bound, when_there = SIGN[node.target]
    tested, at, _ = follow(node.args[0], at, prover, is_index_cast)
    if tested is not hole.raw or node.args[1] != bound or flat(at) != flat(hole.at):
        return None
    if node.target in ONLY_MINUS_ONE and not of_experts(tested):
        raise Unclear(f"{node.name} tests for -1 alone, and other negative indices are not ruled out")
    return there == when_there


def of_experts(node: fx.Node) -> bool:
    """Whether an index was made by the experts, whose only negative number is -1."""
    return node.target is operator.getitem and node.args[1] == 1 and node.args[0].target in EXPERTS
