"""Takes the terms of a sum apart: rows picked by an index, factors that weigh them, masks that drop them.

    where(mask[t, j], rows[idx[t, j], h] * w[t, j], 0)

Factors with the width ``h`` among their places are values and are followed; those without it are small and
end the walk. Nothing here knows what a term is used for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from k3compile.passes.finalize_axes import (
    Places,
    back,
    broadcast,
    flat,
    follow,
    is_cast,
    is_layout,
    no_cast,
    uses,
)
from k3compile.passes.graph import arguments, op_name, tensor
from k3compile.passes.prover import Prover
from torch import fx

aten = torch.ops.aten
ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
FULLS = (aten.full.default, aten.full_like.default, aten.new_full.default, aten.scalar_tensor.default)

CHOICES = (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf)


class Unclear(ValueError):
    """Why a sum cannot be read as a finalize. fix_it: what the model could write instead."""

    def __init__(self, reason: str, fix_it: str | None = None):
        super().__init__(reason)
        self.reason, self.fix_it = reason, fix_it


@dataclass(frozen=True)
class Leaf:
    """A factor and where in it the term's element stands. index: the rows' numbers, for picked rows."""

    node: fx.Node
    at: Places
    index: fx.Node | None = None
    index_at: Places = ()
    wraps: bool = False  # a negative number counts from the end, as in rows[idx]


@dataclass(frozen=True)
class Mask:
    """Terms are kept where ``node`` at ``at`` is ``keeps``, and zero elsewhere.

    weighed: that zero is multiplied by other factors after, and is NaN where one of them is not finite.
    """

    node: fx.Node
    at: Places
    keeps: bool
    weighed: bool = False


@dataclass
class Terms:
    """What was found. nodes: everything with the width that the sum is made of. dtypes: of all casts."""

    prover: Prover
    width: str
    rows: list[Leaf] = field(default_factory=list)
    factors: list[Leaf] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)
    dtypes: set[torch.dtype] = field(default_factory=set)


def read(node: fx.Node, at: Places, terms: Terms, weighed: bool = False) -> None:
    """Follow one operand; ``weighed``: something multiplies it. Raises Unclear."""
    if not uses(at, terms.width):
        found, places, _ = follow(node, at, terms.prover, no_cast)
        terms.factors.append(Leaf(found, places) if flat(places) == flat(at) else Leaf(node, at))
    elif is_cast(node) or is_layout(node):
        before = at if is_cast(node) else back(node, at, terms.prover)
        if before is None:
            raise Unclear(f"{op_name(node)} {node.name} arranges the rows in a way that is not followed")
        if is_cast(node):
            terms.dtypes.add(tensor(node).dtype)
        terms.nodes.append(node)
        read(node.args[0], before, terms, weighed)
    elif node.target is aten.mul.Tensor:
        terms.nodes.append(node)
        for operand in node.args:
            if not isinstance(operand, fx.Node):
                raise Unclear(f"the rows are weighed twice: {node.name} multiplies them by {operand} too")
            read(operand, spread(at, operand, terms), terms, weighed=True)
    elif node.target in CHOICES:
        condition, one, other = node.args
        terms.nodes.append(node)
        keeps = is_zero(other)
        if not keeps and not is_zero(one):
            raise Unclear(f"{node.name} chooses between two values that are both not zero")
        terms.masks.append(mask(condition, spread(at, condition, terms), keeps, terms.prover, weighed))
        kept = one if keeps else other
        read(kept, spread(at, kept, terms), terms, weighed)
    elif node.target is aten.masked_fill.Scalar and node.args[2] == 0:
        terms.nodes.append(node)
        dropped = spread(at, node.args[1], terms)
        terms.masks.append(mask(node.args[1], dropped, False, terms.prover, weighed))
        read(node.args[0], at, terms, weighed)
    elif (picked := pick(node, at)) is not None:
        terms.nodes.append(node)
        terms.rows.append(picked)
    else:
        terms.rows.append(Leaf(node, at))


def spread(at: Places, operand: fx.Node, terms: Terms) -> Places:
    """Places in an operand that may have been broadcast."""
    places = broadcast(at, tensor(operand).shape, terms.prover)
    if places is None:
        raise Unclear(f"{operand.name} is broadcast in a way that is not followed")
    return places


def mask(node: fx.Node, at: Places, keeps: bool, prover: Prover, weighed: bool) -> Mask:
    """A mask, its negations undone."""
    node, at, _ = follow(node, at, prover)
    while negates(node):
        node, at, _ = follow(node.args[0], at, prover)
        keeps = not keeps
    return Mask(node, at, keeps, weighed)


def negates(node: fx.Node) -> bool:
    """Whether a node is true where its input is not; bitwise_not of a number is another number."""
    bitwise = node.target is aten.bitwise_not.default and tensor(node).dtype == torch.bool
    return bitwise or node.target is aten.logical_not.default


def pick(node: fx.Node, at: Places) -> Leaf | None:
    """Rows picked along the first dimension: index_select(x, 0, i), x[i], embedding(x, i)."""
    if node.target is aten.index_select.default and node.args[1] == 0:
        x, _, index = node.args
        return Leaf(x, at[1:], index, at[:1])
    if node.target is aten.index.Tensor and len(node.args[1]) == 1:
        x, (index,) = node.args
        if index is None or tensor(index).dtype == torch.bool:
            return None
        dims = tensor(index).dim()
        return Leaf(x, at[dims:], index, at[:dims], wraps=True)
    if node.target is aten.embedding.default and len(node.args) == 2:
        x, index = node.args
        dims = tensor(index).dim()
        return Leaf(x, at[dims:], index, at[:dims])
    return None


def is_zero(arg: object) -> bool:
    """Whether an argument is a constant zero, or a tensor that is nothing else."""
    if not isinstance(arg, fx.Node):
        return isinstance(arg, (int, float)) and arg == 0
    if arg.target in ZEROS:
        return True
    if arg.target in FULLS:
        named = arguments(arg)
        return named.get("fill_value", named.get("s")) == 0
    return (is_cast(arg) or is_layout(arg)) and is_zero(arg.args[0])
