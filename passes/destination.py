"""Let an op write its results where a scatter would have copied them: destination passing.

    o, state = auto_functionalized_v2(k3.op, ..., _all_bases=[state])
    out1 = index_copy(out0, 0, arange(s, e), o)
                            |
    _, state, out1 = auto_functionalized_v2(
        k3.op_into, ..., start=s, _out_base_index=1, _all_bases=[state, out0])

``op_into`` takes the whole buffer and the first row: a slice of data-dependent length handed to a mutating
op raises, and a strided view of data-dependent offset is silently misplaced by Inductor. The call stays
where the op stood if the buffer exists there, else it moves to the scatter; where it must not, as another op
reads the state that it leaves, an empty buffer is made earlier. The graph stays functional, so a wrong guess
about reuse costs a copy and never a result.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from k3compile.kernels.op import NAMESPACE, OPS
from k3compile.passes.aliasing import Aliases
from k3compile.passes.graph import arguments, emit, schema_writes, tensor, value, values
from k3compile.passes.index_sites import IndexSite
from k3compile.passes.prover import Prover
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2

BUFFER, START = "out", "start"  # the two arguments an ``_into`` twin has beyond its op's
aten = torch.ops.aten
EMPTY = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}  # memory that holds nothing yet: nobody can tell when it was made


@dataclass(frozen=True)
class Destination:
    """A scatter whose source op can write the buffer itself. call is the op's node, place where to put the
    twin, earlier whether the buffer has to be made before it."""

    call: fx.Node
    twin: torch._ops.OpOverload
    place: fx.Node
    earlier: bool = False


def destination(site: IndexSite, aliases: Aliases, prover: Prover) -> Destination | str:
    """How to write ``site`` through, or why it cannot be."""
    call = producer(site.source)
    if call is None:
        return "the source is not the result of an op"
    twin = twin_of(called_op(call))
    if twin is None:
        return "the op has no form that writes into a buffer"
    problem = buffer_problem(site, aliases, prover)
    if problem:
        return problem
    place = place_for(site, call, aliases)
    if not isinstance(place, str):
        return Destination(call, twin, place)
    return Destination(call, twin, call, earlier=True) if may_move(site.base, call, aliases) else place


def producer(source: fx.Node) -> fx.Node | None:
    """The op call whose only result is ``source``: itself, or a functionalised call ``source`` is taken
    from."""
    if source.target is operator.getitem and source.args[1] == 0:
        call = source.args[0]
        return call if call.target is auto_functionalized_v2 else None
    return source if isinstance(source.target, torch._ops.OpOverload) else None


def called_op(call: fx.Node) -> object:
    return call.args[0] if call.target is auto_functionalized_v2 else call.target


def twin_of(op: object) -> torch._ops.OpOverload | None:
    """The ``_into`` form of one of our ops with one result, if its arguments are the op's and the two
    more."""
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != NAMESPACE or len(op._schema.returns) != 1:
        return None
    twin = OPS.get(op._opname + "_into")
    if twin is None:
        return None
    own = [(a.name, a.is_write) for a in op._schema.arguments]
    theirs = [(a.name, a.is_write) for a in twin.overload._schema.arguments]
    fits = sorted(theirs) == sorted([*own, (BUFFER, True), (START, False)])
    return twin.overload if fits else None


def buffer_problem(site: IndexSite, aliases: Aliases, prover: Prover) -> str | None:
    """Why the op may not write ``site.base``: it must be a fresh tensor of which nobody else wants the old
    value."""
    if site.dim != 0:
        return "rows are not the first dimension"
    if len(site.source.users) != 1:
        return "the op's result has another user"
    if not aliases.fresh(site.base):
        return "the buffer is not a fresh tensor"
    if len(site.base.users) != 1:
        return "the buffer has another user"
    buffer, source, result = tensor(site.base), tensor(site.source), tensor(site.node)
    if buffer.dtype != source.dtype or buffer.device != source.device:
        return f"the buffer is {buffer.dtype}, the op's result {source.dtype}"
    if not all(prover.equal(a, b) for a, b in zip(buffer.stride(), result.stride())):
        return "the scatter changes the layout of the buffer"
    return None


def place_for(site: IndexSite, call: fx.Node, aliases: Aliases) -> fx.Node | str:
    """The node before which the twin goes: where the op is, or the scatter if that is right for all else."""
    if aliases.before(site.base, call):
        return call
    others = [user for result in call.users if result is not site.source for user in result.users]
    if not all(aliases.before(site.node, user) for user in others):
        return "another result of the op is needed before the buffer exists"
    node = call.next
    while node is not site.node:
        if any(True for _ in schema_writes(node)):
            return "something is written in place between the op and the scatter"
        node = node.next
    return site.node


def may_move(buffer: fx.Node, call: fx.Node, aliases: Aliases) -> bool:
    """Whether the buffer could as well be made before ``call``."""
    return buffer.target in EMPTY and all(aliases.before(size, call) for size in buffer.all_input_nodes)


def write_through(site: IndexSite, found: Destination, start: fx.Node | int) -> fx.Node:
    """Replace op and scatter by the twin, in place; returns the twin's node. ``start`` is known at
    ``found.place``."""
    graph, call = site.node.graph, found.call
    if found.earlier:
        call.prepend(site.base)
    functional = call.target is auto_functionalized_v2
    kwargs = dict(call.kwargs) if functional else arguments(call)
    bases = [*kwargs.pop("_all_bases", ())]
    kwargs |= {START: start, f"_{BUFFER}_base_index": len(bases), "_all_bases": [*bases, site.base]}
    results = (None, *(value(call)[1:] if functional else ()), value(site.node))
    with graph.inserting_before(found.place):
        new = emit(graph, auto_functionalized_v2, (found.twin,), kwargs, like=call, mode=None, known=results)
        taken = {user.args[1]: user for user in call.users if user is not site.source} if functional else {}
        taken[len(results) - 1] = site.node
        for position, old in taken.items():
            result = emit(graph, operator.getitem, (new, position), like=old, mode=None, known=value(old))
            old.replace_all_uses_with(result)
    keep_eager_strides(call, new)
    for old in [*taken.values(), site.source, call]:
        if not old.users:
            graph.erase_node(old)
    return new


def keep_eager_strides(call: fx.Node, new: fx.Node) -> None:
    """Inductor gives a custom op the strides it had in eager mode, from this note on its node."""
    if "eager_input_vals" in call.meta:
        _, eager = call.meta["eager_input_vals"]
        now = values(new.kwargs)
        kwargs = {name: eager.get(name, now[name]) if name != "_all_bases" else now[name] for name in now}
        new.meta["eager_input_vals"] = ((new.args[0],), kwargs)
