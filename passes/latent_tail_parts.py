"""Grows a finalize into the latent tail: sum over ranks, norm, up-projection and shared expert must follow.

    y -> all_reduce -> wait -> RMS norm -> mm(., up_w.t()) -> add(., all_reduce(shared))

Each step looks at what reads the value so far. Where another thing stands the walk ends with what it is and,
for the orders that compute something else, why it may not be moved.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from k3compile.passes.finalize import Finalize
from k3compile.passes.finalize_axes import REORDER, is_cast, is_weight_cast, reordered
from k3compile.passes.graph import op_name, positions, tensor
from k3compile.passes.lower import ranks_of
from k3compile.passes.prover import Prover
from k3compile.passes.rms_norm import RmsNorm, rms_norm_at
from torch import fx

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
ALL_REDUCE, WAIT = c10d.all_reduce.default, c10d.wait_tensor.default
ADDS = (aten.add.Tensor,)
NORM_REACH = 12  # nodes between the start and the end of the longest spelling of a norm


class Stopped(ValueError):
    """Why a finalize does not grow into a latent tail, and at which node.

    fix_it: what the model could write instead.
    """

    def __init__(self, node: fx.Node, reason: str, fix_it: str | None = None):
        super().__init__(reason)
        self.node, self.reason, self.fix_it = node, reason, fix_it


@dataclass
class Tail:
    """The parts found so far. group: "" without a sum over ranks. nodes: in order, and gone afterwards.

    up: the weight, [D, L] or, with ``up_is_transposed``, [L, D]. shared: [T, D] before its sum over ranks,
    if group. lone: sums over a group of one rank that go too.
    """

    finalize: Finalize
    end: fx.Node
    nodes: list[fx.Node] = field(default_factory=list)
    group: str = ""
    lone: int = 0
    norm: RmsNorm | None = None
    up: fx.Node | None = None
    up_is_transposed: bool = False
    shared: fx.Node | None = None
    parts: tuple[str, ...] = ("finalize",)

    def advance(self, part: str, *nodes: fx.Node) -> None:
        """Take nodes into the tail; the last holds the value so far."""
        self.nodes += nodes
        self.end = nodes[-1] if nodes else self.end
        self.parts += (part,) if part else ()


def grow(tail: Tail, prover: Prover) -> None:
    """Find the parts behind the finalize of ``tail``. Raises Stopped; ``tail`` is as far as it got."""
    if tail.finalize.spelling != "k3.finalize":
        check_readers(tail.finalize)
    skip_casts(tail)
    group = reduce_step(tail)
    skip_casts(tail)
    norm_step(tail, prover)
    skip_casts(tail)
    up_step(tail, prover)
    skip_casts(tail)
    add_step(tail, group, prover)
    skip_casts(tail, last=True)
    tail.nodes = list(dict.fromkeys(tail.nodes))


def check_readers(found: Finalize) -> None:
    """Every node of the finalize but its result is read inside it alone."""
    inside = set(found.nodes)
    for node in inside - {found.result}:
        alone(node, inside)


def skip_casts(tail: Tail, last: bool = False) -> None:
    """Follow casts that are the only reader; at the end only back to the model's dtype."""
    while len(tail.end.users) == 1 and is_cast(user := next(iter(tail.end.users))):
        if last and tensor(tail.end).dtype == tensor(tail.finalize.rows).dtype:
            return
        tail.advance("", user)


def reduce_step(tail: Tail) -> str | None:
    """The sum over ranks, if there is one: its group, "" in the tail where the group is one rank."""
    reduce = reader(tail.end, ALL_REDUCE)
    if reduce is None:
        return None
    alone(tail.end, {reduce})
    _, how, group = reduce.args
    if how != "sum":
        raise Stopped(reduce, f"the partial sums are reduced by {how}, not by sum")
    wait = waited(reduce)
    sent, model = tensor(tail.end).dtype, tensor(tail.finalize.rows).dtype
    tail.advance("sum over ranks", reduce, wait)
    if ranks_of(group) == 1:
        tail.lone += 1
        return group
    if sent != model:
        raise Stopped(reduce, f"{short(sent)} is summed over ranks, the experts' rows are {short(model)}")
    tail.group = group
    return group


def waited(reduce: fx.Node) -> fx.Node:
    """The one wait_tensor of an all_reduce."""
    (wait, *more) = reduce.users
    if more or wait.target is not WAIT:
        raise Stopped(reduce, f"{reduce.name} has another reader than one wait_tensor")
    return wait


def norm_step(tail: Tail, prover: Prover) -> None:
    """An RMS norm of the value so far, with a gain."""
    trail = [tail.end]  # casts before it count as the norm's own
    while is_cast(trail[-1]) and trail[-1] in tail.nodes:
        trail.append(trail[-1].args[0])
    norm = norm_of(trail, prover)
    if norm is None:
        raise no_norm(tail)
    if norm.weight is None:
        raise Stopped(norm.result, "the norm has no gain")
    inside = norm.nodes
    for node in (*trail[: trail.index(norm.x) + 1], *(inside - {norm.result})):
        alone(node, {*inside, *trail})
    place = positions(tail.end.graph)
    tail.norm = norm
    tail.advance("norm", *sorted(inside - {norm.result}, key=place.__getitem__), norm.result)


def norm_of(values: list[fx.Node], prover: Prover) -> RmsNorm | None:
    """The norm of one of ``values`` that has the most nodes: with its gain and last cast; None if none."""
    best, seen, front = None, set(values), values
    for _ in range(NORM_REACH):
        front = list(dict.fromkeys(u for node in front for u in node.users if u not in seen))
        seen |= set(front)
        for user in front:
            found = rms_norm_at(user, prover) if user.op == "call_function" else None
            if found is not None and found.x in values and (best is None or found.nodes > best.nodes):
                best = found
    return best


def no_norm(tail: Tail) -> Stopped:
    """What stands where the norm should be."""
    users = list(tail.end.users)
    for user in users:
        if user.target in ADDS:
            ahead = norm_behind(user)
            if ahead == "all_reduce" and "sum over ranks" not in tail.parts:
                return Stopped(
                    user,
                    "something is added before the sum over ranks and before the norm: another order of sums",
                    "add the shared expert after the up projection",
                )
            return Stopped(user, f"no norm follows the weighted sum: {op_name(user)} {user.name} adds to it")
        if user.target is ALL_REDUCE:
            return Stopped(user, "the value is summed over ranks twice")
    names = ", ".join(f"{op_name(u)} {u.name}" for u in users) or "nothing"
    return Stopped(tail.end, f"no RMS norm follows the weighted sum: it is read by {names}")


def norm_behind(node: fx.Node) -> str:
    """``all_reduce`` where the sum over ranks comes after ``node``."""
    while len(node.users) == 1:
        node = next(iter(node.users))
        if node.target is ALL_REDUCE:
            return "all_reduce"
        if not is_cast(node):
            break
    return ""


def up_step(tail: Tail, prover: Prover) -> None:
    """The product with a weight, without a bias."""
    users = list(tail.end.users)
    if reader(tail.end, ALL_REDUCE) is not None:
        why = "the norm comes before the sum over ranks: the norm of a sum is not the sum of norms"
        raise Stopped(users[0], why, "reduce the weighted sum, then take its norm")
    bias = next((u for u in users if u.target in (aten.addmm.default,) or has_bias(u)), None)
    if bias is not None:
        raise Stopped(bias, f"the up projection has a bias: {op_name(bias)} {bias.name}")
    product = next((u for u in users if u.target in (aten.mm.default, aten.linear.default)), None)
    if product is None or product.args[0] is not tail.end:
        names = ", ".join(f"{op_name(u)} {u.name}" for u in users) or "nothing"
        raise Stopped(tail.end, f"no up projection follows the norm: it is read by {names}")
    alone(tail.end, {product})
    if tensor(product).dim() != 2:
        raise Stopped(product, f"the up projection has {tensor(product).dim()} dimensions, not token rows")
    model, used = tensor(tail.finalize.rows).dtype, tensor(product).dtype
    if used != model:
        raise Stopped(
            product, f"the up projection runs in {short(used)}, the experts' rows are {short(model)}"
        )
    weight, transposed = product.args[1], product.target is aten.mm.default
    if weight is tail.end:
        raise Stopped(product, "the normed value is multiplied by itself, not by a weight")
    weight, _ = uncast(weight, model)
    while weight.target in REORDER and tensor(weight).dim() == 2:
        transposed = transposed != (reordered(weight) == [1, 0])
        weight, _ = uncast(weight.args[0], model)
    tail.up, tail.up_is_transposed = weight, transposed
    tail.advance("up projection", product)


def has_bias(node: fx.Node) -> bool:
    return node.target is aten.linear.default and len(node.args) > 2 and node.args[2] is not None


def add_step(tail: Tail, group: str | None, prover: Prover) -> None:
    """The shared expert, summed over the same ranks, added last."""
    users = list(tail.end.users)
    if (reduce := reader(tail.end, ALL_REDUCE)) is not None:
        raise Stopped(reduce, "the result of the up projection is summed over ranks once more")
    add = next((u for u in users if u.target in ADDS and not u.kwargs and len(u.args) == 2), None)
    if add is None:
        names = ", ".join(f"{op_name(u)} {u.name}" for u in users) or "nothing"
        raise Stopped(tail.end, f"no shared expert is added to the up projection: it is read by {names}")
    alone(tail.end, {add})
    one, other = add.args
    shared = other if one is tail.end else one
    if not isinstance(shared, fx.Node) or shared is tail.end:
        raise Stopped(add, f"what is added to the up projection is not another tensor: {shared}")
    sizes = zip(tensor(shared).shape, tensor(add).shape)
    if tensor(shared).dim() != 2 or not all(prover.equal(a, b) for a, b in sizes):
        raise Stopped(
            add, f"{shared.name} is broadcast over the rows: that is a bias and not a shared expert"
        )
    tail.shared = shared_partial(tail, shared, group)
    tail.advance("shared expert", add)


def shared_partial(tail: Tail, shared: fx.Node, group: str | None) -> fx.Node:
    """The shared expert's own part of the sum over the latent's group."""
    inner, casts = uncast(shared, tensor(tail.finalize.rows).dtype)
    reduce = inner.args[0] if inner.target is WAIT else None
    own = reduce.args[2] if reduce is not None and reduce.target is ALL_REDUCE else None
    if not tail.group:
        sums = own is not None and own == group and tail.lone and reduce.args[1] == "sum"
        if not sums or any(len(node.users) != 1 for node in (reduce, inner, *casts)):
            return shared
        tail.lone += 1
    elif own is None:
        why = f"{shared.name} is not summed over ranks and the latent is: the op would sum it"
        raise Stopped(
            shared, why, "keep the shared expert's partial sum and all_reduce it over the same group"
        )
    elif own != tail.group or reduce.args[1] != "sum":
        how = f"the shared expert by {reduce.args[1]} over group {own}"
        raise Stopped(reduce, f"the latent is summed over group {tail.group} and {how}")
    for node in (reduce, inner, *casts):
        if len(node.users) != 1:
            raise Stopped(node, f"the sum of the shared expert {node.name} has another reader")
    tail.nodes += [reduce, inner, *casts]
    return reduce.args[0]


def reader(node: fx.Node, target: object) -> fx.Node | None:
    """A node that calls ``target`` on ``node``."""
    return next((u for u in node.users if u.target is target), None)


def alone(node: fx.Node, readers: set[fx.Node] | frozenset[fx.Node]) -> None:
    """Nobody but ``readers`` may read ``node``: it would have to be computed all the same."""
    for user in node.users:
        if user not in readers:
            name = "the graph's output" if user.op == "output" else f"{op_name(user)} {user.name}"
            raise Stopped(node, f"{op_name(node)} {node.name} has another reader: {name}")


def uncast(node: fx.Node, model: torch.dtype) -> tuple[fx.Node, list[fx.Node]]:
    """A weight before it was given the activations' dtype, and the casts. One that rounds more stays."""
    casts = []
    while is_weight_cast(node, model):
        casts.append(node)
        node = node.args[0]
    return node, casts


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
