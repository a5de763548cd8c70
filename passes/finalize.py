"""Recognises the finalize of a mixture of experts: rows picked by an index, weighed, and summed over top-k.

    y[t] = sum_j w[t, j] * rows[idx[t, j]]

    index_select -> view -> mul -> sum          rows[idx] -> permute, view, bmm (einsum, matmul)
    zeros -> index_add at arange(T) repeated    k3.finalize

The terms of the sum are followed back to what they are made of with places in hand (finalize_axes.py), so
views, casts, the order of factors and the spelling of the product do not matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
import torch
from k3compile.kernels import acc
from k3compile.passes.finalize_axes import (
    Digit,
    Place,
    Places,
    broadcast,
    flat,
    follow,
    is_cast,
    is_index_cast,
    is_layout,
    no_cast,
    whole,
)
from k3compile.passes.finalize_holes import Hole, index_base, sign_test
from k3compile.passes.finalize_terms import CHOICES, Leaf, Terms, Unclear, is_zero, read
from k3compile.passes.graph import arguments, tensor
from k3compile.passes.prover import Prover, Size, expr
from torch import fx

aten, prims, k3 = torch.ops.aten, torch.ops.prims, torch.ops.k3
NARROW = "router weights are {} and the sum is kept in {}"


@dataclass(frozen=True)
class Finalize:
    """What a weighted sum of picked rows is made of, as it stands in the graph.

    result: [T, L]. rows: [N, L], or [T, k, L] where index is None: then row (t j) is token t's j-th.
    weights, index: [T, k], perhaps with other dimensions of size 1 or flattened. zeroing: a [T, k] of 0 and
    1 that the weights are multiplied by. wraps: a negative index counts from the end. drops: it is a hole.
    nodes: all with width L that exist for this sum alone, result last. dtypes: what they are cast to.
    """

    result: fx.Node
    rows: fx.Node
    weights: fx.Node
    index: fx.Node | None
    top_k: Size
    nodes: tuple[fx.Node, ...]
    spelling: str
    zeroing: fx.Node | None = None
    wraps: bool = False
    drops: bool = False
    dtypes: frozenset[torch.dtype] = frozenset()


@dataclass(frozen=True)
class NotFinalize:
    """A sum of picked and weighed rows that is no finalize, and why."""

    node: fx.Node
    reason: str
    fix_it: str | None = None


@dataclass(frozen=True)
class Sum:
    """A contraction: its operands with places in t, j and h, summed over j."""

    result: fx.Node
    operands: tuple[tuple[fx.Node, Places], ...]
    token: Place
    choice: Place
    nodes: tuple[fx.Node, ...]
    spelling: str


def finalize_at(node: fx.Node, prover: Prover) -> Finalize | NotFinalize | None:
    """What the sum at ``node`` is; None where no rows are picked by an index, weighed and summed."""
    if node.target is k3.finalize.default:
        rows, weights, index = node.args
        top_k = tensor(index).shape[1]
        return Finalize(node, rows, weights, index, top_k, (node,), "k3.finalize", drops=True)
    found = reduction(node, prover) or product(node, prover) or scatter(node, prover)
    if found is None or isinstance(found, NotFinalize):
        return found
    terms = Terms(prover, "h")
    try:
        for operand, at in found.operands:
            read(operand, at, terms, weighed=len(found.operands) > 1)
        return classify(found, terms)
    except Unclear as unclear:
        picked = any(leaf.index is not None for leaf in terms.rows)
        return NotFinalize(found.result, unclear.reason, unclear.fix_it) if picked else None


def reduction(node: fx.Node, prover: Prover) -> Sum | None:
    """sum(x [T, k, L], 1); over another dimension it is read too, and refused with that reason."""
    if node.target is not aten.sum.dim_IntList or tensor(node.args[0]).dim() != 3:
        return None
    named = arguments(node)
    dims = [d % 3 for d in named["dim"] or ()]
    if len(dims) != 1 or named["keepdim"] or dims[0] == 2:
        return None
    names = "jth" if dims[0] == 0 else "tjh"
    at = whole(node.args[0], prover, names)
    token, choice = (at[1], at[0]) if dims[0] == 0 else (at[0], at[1])
    return Sum(node, ((node.args[0], at),), token, choice, (node,), "mul and sum")


def product(node: fx.Node, prover: Prover) -> Sum | None:
    """bmm(w [T, 1, k], x [T, k, L]) in either order, shown as [T, L] by what reads it."""
    if node.target is not aten.bmm.default:
        return None
    one, other = node.args
    result = node
    while tensor(result).dim() != 2:
        users = list(result.users)
        if len(users) != 1 or not is_layout(users[0]):
            return None
        result = users[0]
    at = whole(result, prover, "th")
    source, places, trail = follow(result, at, prover, no_cast)
    if source is not node:
        return None
    batch, row, column = places
    size = tensor(one).shape[2]
    choice = () if prover.equal(size, 1) else (Digit("j", size),)
    operands = ((one, (batch, row, choice)), (other, (batch, choice, column)))
    return Sum(result, operands, at[0], choice, (node, *reversed(trail)), "bmm")


def scatter(node: fx.Node, prover: Prover) -> Sum | NotFinalize | None:
    """index_add(zeros [T, L], 0, tokens [N], x [N, L]) where row n belongs to token n // k."""
    base, index, source = None, None, None
    if node.target is aten.index_add.default and not node.kwargs and node.args[1] == 0:
        base, _, index, source = node.args
    elif node.target is aten.index_put.default and len(node.args) == 4 and node.args[3] is True:
        base, (index, *more), source, _ = node.args
        index = None if more else index
    if index is None or not is_zero(base) or tensor(source).dim() != 2 or tensor(index).dim() != 1:
        return None
    if not weighs(source):
        return None
    tokens, count = tensor(node).shape[0], tensor(source).shape[0]
    ratio = sympy.simplify(expr(count) / expr(tokens)) if expr(tokens) != 0 else None
    if ratio is None or not (ratio.is_Integer and ratio > 0):
        return NotFinalize(node, f"{expr(count)} rows are added at {expr(tokens)} tokens: top-k is not known")
    token = () if prover.equal(tokens, 1) else (Digit("t", tokens),)
    choice = () if ratio == 1 else (Digit("j", int(ratio)),)
    if not counts_tokens(index, (token + choice,), token, prover):
        why = f"which token a row is added to is not known: {index.name} is not arange(T) repeated k times"
        hint = "keep each token's rows together and use torch.arange(T).repeat_interleave(k)"
        return NotFinalize(node, why, hint)
    width = tensor(source).shape[1]
    at = (token + choice, () if prover.equal(width, 1) else (Digit("h", width),))
    return Sum(node, ((source, at),), token, choice, (node,), "index_add")


def weighs(node: fx.Node) -> bool:
    """Whether ``node`` shows a product, some of it perhaps set to zero."""
    while isinstance(node, fx.Node):
        if node.target is aten.mul.Tensor:
            return True
        if node.target in CHOICES:
            node = node.args[1] if is_zero(node.args[2]) else node.args[2]
        elif is_layout(node) or is_cast(node) or node.target is aten.masked_fill.Scalar:
            node = node.args[0]
        else:
            return False
    return False


def counts_tokens(index: fx.Node, at: Places, token: Place, prover: Prover) -> bool:
    """Whether ``index`` is the number of the token at every place: arange(T) repeated, or arange(N) // k."""
    (row,) = at
    node, at, _ = follow(index, at, prover, is_index_cast)
    if node.target in (aten.floor_divide.default, aten.div.Tensor_mode):
        floors = node.kwargs.get("rounding_mode", "floor") in ("floor", "trunc")
        inner, by = node.args[:2]
        size = row[-1].size if len(row) > len(token) else 1
        if not floors or isinstance(by, (float, fx.Node)) or not prover.equal(by, size):
            return False
        counted, places, _ = follow(inner, at, prover, is_index_cast)
        return is_arange(counted) and places == (row,)
    return is_arange(node) and at == (token,)


def is_arange(node: fx.Node) -> bool:
    """Whether a node counts 0, 1, 2, ..."""
    if node.target is prims.iota.default:
        return node.kwargs["start"] == 0 and node.kwargs["step"] == 1
    return node.target is aten.arange.default


def classify(found: Sum, terms: Terms) -> Finalize | NotFinalize | None:
    """Tell rows, weights and holes apart. Raises Unclear."""
    if len(terms.rows) != 1 or not terms.factors:
        return None
    (rows,) = terms.rows
    order = found.token + found.choice
    if rows.index is not None and flat(rows.index_at) != order:
        if found.choice and flat(rows.index_at) == found.choice + found.token:
            raise Unclear("top-k is not the last dimension of the index: the sum runs over its first")
        return None
    if rows.index is None and flat(rows.at[:-1]) != order:
        return None
    if rows.index is not None and (tensor(rows.node).dim() != 2 or {d.name for d in flat(rows.at)} != {"h"}):
        return None
    hole = index_base(rows, terms.prover)
    weights, zeroing = [], []
    for factor in terms.factors:
        tested = sign_test(factor.node, factor.at, hole, terms.prover)
        (weights if tested is None else zeroing).append(factor)
    if not weights:
        return None
    if len(weights) > 1:
        names = " and ".join(leaf.node.name for leaf in weights)
        raise Unclear(f"the rows are weighed twice: by {names}")
    return assemble(found, terms, rows, weights[0], zeroing, hole)


def zero_in(weights: Leaf, hole: Hole, prover: Prover) -> bool:
    """Whether the weights are zero for holes, whatever they were before."""
    node, at, _ = follow(weights.node, weights.at, prover)
    if node.target is aten.masked_fill.Scalar and node.args[2] == 0:
        test, keeps = node.args[1], False
    elif node.target in CHOICES:
        test, one, other = node.args
        keeps = is_zero(other)
        if not keeps and not is_zero(one):
            return False
    else:
        return False
    places = broadcast(at, tensor(test).shape, prover)
    return places is not None and sign_test(test, places, hole, prover) is keeps


def assemble(
    found: Sum, terms: Terms, rows: Leaf, weights: Leaf, zeroing: list[Leaf], hole: Hole
) -> Finalize:
    """The finalize, with its obligations checked. Raises Unclear."""
    order = found.token + found.choice
    if flat(weights.at) != order:
        raise Unclear(f"the weights {weights.node.name} are not one for each token and choice")
    wide, given = acc(tensor(rows.node).dtype), tensor(weights.node).dtype
    if given != wide:
        raise Unclear(NARROW.format(str(given)[6:], str(wide)[6:]))
    for one in terms.masks:
        tested = sign_test(one.node, one.at, hole, terms.prover)
        if tested is None:
            raise Unclear(f"{one.node.name} drops rows by something else than the sign of their index")
        if tested != one.keeps:
            raise Unclear(f"{one.node.name} keeps the holes and drops the rows")
    if terms.masks and all(one.weighed for one in terms.masks) and not zero_in(weights, hole, terms.prover):
        why = f"the zero of a hole is multiplied by its weight in {weights.node.name}, perhaps not finite"
        raise Unclear(why, "drop the holes after their rows were weighed")
    keeps_flags = [sign_test(z.node, z.at, hole, terms.prover) for z in zeroing]
    if not all(keeps_flags):
        raise Unclear("the weights are multiplied by the holes' own mask: the rows would be dropped")
    drops = bool(terms.masks)
    index, wraps = rows.index, False
    if index is not None:
        index = hole.marked if drops else hole.read
        if index is None:
            raise Unclear(f"the index {hole.raw.name} is kept in another order than the rows are picked in")
        wraps = rows.wraps and not drops and not hole.never_negative
    nodes = (*reversed(terms.nodes), *found.nodes)
    zero = zeroing[0].node if zeroing and not drops else None
    size = found.choice[0].size if found.choice else 1
    return Finalize(
        found.result,
        rows.node,
        weights.node,
        index,
        size,
        nodes,
        found.spelling,
        zero,
        wraps,
        drops,
        frozenset(terms.dtypes),
    )
