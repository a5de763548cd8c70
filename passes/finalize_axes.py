"""Follows elements of a tensor back through views: which element of what stands at these places?

    y[t, j, h]   of view(x, [T, k, H]), x [T*k, H]       is   x[(t j), h]
                 of permute(x, [0, 2, 1])                     x[t, h, j]
                 of expand(x, [T, k, H]), x [T, k, 1]         x[t, j, ()]

The place in one dimension is written like a number: digits, the major one first, each with its own size.
So one rule follows view, unsqueeze, squeeze, flatten, permute and expand, whatever the spelling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from k3compile.kernels import acc
from k3compile.passes.graph import arguments, tensor
from k3compile.passes.prover import Prover, Size
from torch import fx

aten, prims = torch.ops.aten, torch.ops.prims


@dataclass(frozen=True, eq=False)  # told apart by identity: comparing symbolic sizes would add guards
class Digit:
    """A loop variable and how many values it has."""

    name: str
    size: Size


Place = tuple[Digit, ...]  # in one dimension; () is the only place of a dimension of size 1
Places = tuple[Place, ...]

SAME = (aten.clone.default, aten.alias.default, aten.detach.default, aten.contiguous.default)
REGROUP = (
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
)
REORDER = (aten.permute.default, aten.transpose.int, aten.t.default)
LAYOUT = (*SAME, *REGROUP, *REORDER, aten.expand.default)
CASTS = (aten._to_copy.default, prims.convert_element_type.default)
ROW_NUMBERS = (torch.int32, torch.int64)
WEIGHTS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def is_cast(node: object) -> bool:
    """Whether ``node`` only gives its input another dtype, on the same device."""
    if not isinstance(node, fx.Node) or node.target not in CASTS:
        return False
    return tensor(node).device == tensor(node.args[0]).device


def is_index_cast(node: object) -> bool:
    """Whether a cast keeps every number of a row: those to fewer bits, from floats and from bool do not."""
    return is_cast(node) and {tensor(node).dtype, tensor(node.args[0]).dtype} <= {*ROW_NUMBERS}


def is_weight_cast(node: object, model: torch.dtype) -> bool:
    """Whether a cast of a weight only gives it more bits, or rounds it from acc to the model's dtype."""
    if not is_cast(node):
        return False
    before, after = tensor(node.args[0]).dtype, tensor(node).dtype
    return before in WEIGHTS and (after == acc(before) or (after == model and before == acc(model)))


def no_cast(node: object) -> bool:
    """No cast is followed."""
    return False


def is_layout(node: object) -> bool:
    """Whether ``node`` shows the elements of its first argument in another arrangement."""
    return isinstance(node, fx.Node) and node.target in LAYOUT


def whole(node: fx.Node, prover: Prover, names: str = "abcdefgh") -> Places:
    """Places for every element of ``node``: one digit a dimension, none where the size is 1."""
    shape = tensor(node).shape
    return tuple(() if prover.equal(s, 1) else (Digit(n, s),) for n, s in zip(names, shape))


def back(node: fx.Node, at: Places, prover: Prover) -> Places | None:
    """Where the elements of a layout node's input are that the node shows ``at``; None if that is unclear."""
    shape = tensor(node.args[0]).shape
    if node.target in SAME:
        return at
    if node.target in REGROUP:
        return regroup(flat(at), shape, prover)
    if node.target in REORDER:
        order = reordered(node)
        return tuple(at[order.index(d)] for d in range(len(order)))
    return broadcast(at, shape, prover)


def follow(
    node: fx.Node, at: Places, prover: Prover, casts: Callable[[object], bool] = is_cast
) -> tuple[fx.Node, Places, list[fx.Node]]:
    """What ``node`` shows ``at``, as far back as layout and ``casts`` go; with the nodes on the way."""
    trail = []
    while is_layout(node) or casts(node):
        before = at if is_cast(node) else back(node, at, prover)
        if before is None:
            break
        trail.append(node)
        node, at = node.args[0], before
    return node, at, trail


def reordered(node: fx.Node) -> list[int]:
    """Which dimension of the input each dimension of the result is."""
    count = tensor(node).dim()
    order, named = list(range(count)), arguments(node)
    if node.target is aten.permute.default:
        return [d % count for d in named["dims"]]
    if node.target is aten.transpose.int:
        one, other = named["dim0"] % count, named["dim1"] % count
        order[one], order[other] = other, one
        return order
    return order[::-1]


def regroup(digits: Place, shape: tuple[Size, ...], prover: Prover) -> Places | None:
    """The digits cut into one place a dimension, so that each place has the dimension's size."""
    places, rest = [], list(digits)
    for size in shape:
        place, product = [], 1
        while not prover.equal(product, size):
            if not rest:
                return None
            place.append(rest.pop(0))
            product = product * place[-1].size
        places.append(tuple(place))
    return None if rest else tuple(places)


def broadcast(at: Places, shape: tuple[Size, ...], prover: Prover) -> Places | None:
    """Places in an operand of ``shape`` that was broadcast to what ``at`` describes."""
    if len(shape) > len(at):
        return None
    kept = at[len(at) - len(shape) :]
    places = tuple(() if prover.equal(size, 1) else place for place, size in zip(kept, shape))
    fits = all(not p or prover.equal(extent(p), size) for p, size in zip(places, shape))
    return places if fits else None


def extent(place: Place) -> Size:
    """How many values a place takes."""
    product: Size = 1
    for digit in place:
        product = product * digit.size
    return product


def flat(at: Places) -> Place:
    """All digits in order."""
    return tuple(digit for place in at for digit in place)


def uses(at: Places, name: str) -> bool:
    """Whether a digit occurs in the places."""
    return any(d.name == name for place in at for d in place)
