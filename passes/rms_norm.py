"""Recognises an RMSNorm however it is spelled: as one op, or as the arithmetic that it decomposes into.

s = x * x              pow(x, 2), square(x), mul(x, x)
m = mean(s, -1)        or sum(s, -1) / D
r = rsqrt(m + eps)     or 1 / sqrt, or x / sqrt
y = x * r * w          built in: rounded once, after the gain; Hugging Face: before the gain, and after
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from k3compile.passes.finalize_axes import Places, broadcast, follow, is_cast, is_weight_cast, whole
from k3compile.passes.graph import arguments, tensor, value
from k3compile.passes.prover import Prover
from torch import fx

aten, k3 = torch.ops.aten, torch.ops.k3
Rounding = Literal["once", "before the gain"]


@dataclass(frozen=True)
class RmsNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    result: the node that holds y. x: before any cast to a wider dtype. weight: [D], None without a gain, and
    like x not yet cast. nodes: all that make up the norm, casts of x among them, of the weight not.
    """

    result: fx.Node
    x: fx.Node
    weight: fx.Node | None
    eps: float
    rounding: Rounding
    nodes: frozenset[fx.Node]


def rms_norm_at(node: fx.Node, prover: Prover) -> RmsNorm | None:
    """The norm whose last node is ``node``; casts of its result count as part of it."""
    trail = [node]
    while is_cast(trail[-1]):
        trail.append(trail[-1].args[0])
    last = trail[-1]
    if tensor(last) is None or tensor(last).dim() == 0:
        return None
    found = whole_op(last) or with_gain(last, prover) or without_gain(last, prover)
    return None if found is None else replace(found, result=node, nodes=found.nodes | set(trail))


def whole_op(node: fx.Node) -> RmsNorm | None:
    """One op, or the first result of one."""
    call = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else node
    if call.target is k3.rms_norm.default:
        x, weight, eps = call.args
        return RmsNorm(node, x, weight, eps, "before the gain", frozenset({node}))
    if call.target not in (aten.rms_norm.default, aten._fused_rms_norm.default):
        return None
    named = arguments(call)
    if len(named["normalized_shape"]) != 1 or (call is not node and len(call.users) != 1):
        return None  # a second reader wants 1 / rms itself
    eps = named["eps"] if named["eps"] is not None else torch.finfo(tensor(named["input"]).dtype).eps
    return RmsNorm(node, named["input"], named["weight"], eps, "once", frozenset({node, call}))


def with_gain(node: fx.Node, prover: Prover) -> RmsNorm | None:
    """mul(unit, gain) in either order; the gain depends on the last dimension alone."""
    if node.target is not aten.mul.Tensor:
        return None
    at = whole(node, prover)
    casts = partial(is_weight_cast, model=tensor(node).dtype)
    for unit, gain in (node.args, node.args[::-1]):
        if not isinstance(unit, fx.Node) or not isinstance(gain, fx.Node):
            continue
        places = broadcast(at, tensor(gain).shape, prover)
        weight, there, _ = (gain, None, []) if places is None else follow(gain, places, prover, casts)
        if there != at[-1:] or tensor(unit).dim() != len(at):
            continue
        trail = []
        while is_cast(unit):
            trail.append(unit)
            unit = unit.args[0]
        found = without_gain(unit, prover)
        if found is not None:
            narrowed = any(bits(cast) < bits(unit) for cast in trail)
            nodes = found.nodes | {node, *trail}
            rounding = "before the gain" if narrowed else "once"
            return RmsNorm(node, found.x, weight, found.eps, rounding, nodes)
    return None


def without_gain(node: fx.Node, prover: Prover) -> RmsNorm | None:
    """mul(x, rsqrt(mean(x^2) + eps)) in either order, or div(x, sqrt(...))."""
    if node.target is aten.mul.Tensor:
        pairs, exponent = (node.args, node.args[::-1]), -0.5
    elif node.target is aten.div.Tensor:
        pairs, exponent = (node.args,), 0.5
    else:
        return None
    at = whole(node, prover)
    for wide, scale in pairs:
        if not isinstance(wide, fx.Node) or not isinstance(scale, fx.Node):
            continue
        places = broadcast(at, tensor(scale).shape, prover)
        found = None if places is None else root(scale, places, exponent, prover)
        if found is None or found[1] not in (at[:-1], (*at[:-1], ())):
            continue
        squared, _, eps, nodes = found
        x, x_too = widened(wide), widened(squared)
        if x[-1] is x_too[-1]:
            return RmsNorm(node, x[-1], None, eps, "once", frozenset({node, *x[:-1], *x_too[:-1], *nodes}))
    return None


def root(
    node: fx.Node, at: Places, exponent: float, prover: Prover
) -> tuple[fx.Node, Places, float, set[fx.Node]] | None:
    """For ``(mean(x^2) + eps) ** exponent``: x, where the mean is read, eps, and the nodes."""
    node, at, trail = follow(node, at, prover)
    nodes = {*trail, node}
    if exponent < 0 and node.target is aten.reciprocal.default:
        node, exponent = node.args[0], 0.5
        nodes.add(node)
    takes_root = node.target is (aten.rsqrt.default if exponent < 0 else aten.sqrt.default)
    if not takes_root and not (node.target is aten.pow.Tensor_Scalar and node.args[1] == exponent):
        return None
    total = node.args[0]
    adds = isinstance(total, fx.Node) and total.target in (aten.add.Tensor, aten.add.Scalar)
    if not adds or not isinstance(total.args[1], float) or len(total.args) > 2 or total.kwargs:
        return None
    mean, at, trail = follow(total.args[0], at, prover)
    found = mean_of_square(mean, prover)
    return None if found is None else (found[0], at, total.args[1], {*nodes, total, *trail, *found[1]})


def mean_of_square(node: fx.Node, prover: Prover) -> tuple[fx.Node, set[fx.Node]] | None:
    """What is squared, and the nodes, of the mean of squares over the last dimension."""
    nodes, parts = {node}, None
    if node.target is aten.div.Tensor:
        node, parts = node.args
        nodes.add(node)
    if not isinstance(node, fx.Node) or node.target not in (aten.mean.dim, aten.sum.dim_IntList):
        return None
    square, shape = node.args[0], tensor(node.args[0]).shape
    if (node.target is aten.mean.dim) != (parts is None) or [d % len(shape) for d in node.args[1]] != [
        len(shape) - 1
    ]:
        return None
    count = value(parts)
    if parts is not None and not (isinstance(count, (int, torch.SymInt)) and prover.equal(count, shape[-1])):
        return None
    power = square.target is aten.pow.Tensor_Scalar and square.args[1] == 2
    product = square.target is aten.mul.Tensor and square.args[0] is square.args[1]
    if power or product or square.target is aten.square.default:
        return square.args[0], nodes | {square}
    return None


def widened(node: fx.Node) -> list[fx.Node]:
    """``node`` and what it is a cast of, as far as the casts only add bits."""
    trail = [node]
    while is_cast(trail[-1]) and bits(trail[-1]) >= bits(trail[-1].args[0]):
        trail.append(trail[-1].args[0])
    return trail


def bits(node: fx.Node) -> int:
    return tensor(node).dtype.itemsize
