"""What Inductor 2.13 computes wrongly, without a word, in a graph that is right: found before it gets there.

    y = scatter(x, ...); copy_(x, v)      y is written into x, then v over it          (x is an input)
    y = scatter(x, ...); copy_(x, f(y))   f reads rows of y that are being written
    op(x, x!)                             a clone of x was dropped: op reads its own writes
    copy_(a, ...); copy_(b, a)            a copy of a was dropped: b gets the new a
    v = x * 2; op(v, x!); v + 1           v is computed again after op has written x
    x[i] = f(x)                           rows of x are read that are being written

Each is reported upstream; with our rewrites or without, the graph is then better compiled by somebody else.
The rules are wider than the mistakes: what is never right to guess is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from k3compile.passes.aliasing import COPIES, SCATTERS, functional_bases, passes_through
from k3compile.passes.graph import AUTO_FUNCTIONALIZED, arguments, op_name, positions, tensor
from k3compile.passes.in_place import viewed
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

aten = torch.ops.aten
COPY = aten.copy_.default
NEUTRAL = {  # with this second argument the result is the first
    aten.mul.Tensor: 1,
    aten.div.Tensor: 1,
    aten.add.Tensor: 0,
    aten.sub.Tensor: 0,
}
CARRIED_OUT = {COPY, aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
PARTIAL = {  # write the second argument over a part of the first
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.as_strided_scatter.default,
}


def hazards(graph: fx.Graph) -> list[str]:
    """What of ``graph`` Inductor may compute wrongly, as sentences; none for nearly every graph."""
    copies = [node for node in graph.find_nodes(op="call_function", target=COPY) if is_input(node.args[0])]
    found = [
        *reads_own_writes(graph),
        *stale_copies(copies),
        *lost_versions(graph, copies),
        *late_reads(graph),
        *old_versions_read(graph, copies),
    ]
    return [*dict.fromkeys(found)]


def is_input(node: fx.Node) -> bool:
    return node.op == "placeholder"


def origin(node: fx.Node) -> fx.Node:
    """The node whose elements ``node`` shows or repeats, through views and copies that may be dropped."""
    while True:
        source = viewed(node)
        if source is None and node.target in COPIES and isinstance(node.args[0], fx.Node):
            source = node.args[0] if passes_through(node, node.args[0]) else None
        if repeats(node):
            source = node.args[node.target is aten.slice_scatter.default]
        if node.target is aten.copy.default and isinstance(node.args[1], fx.Node):
            source = node.args[1]  # all of the first argument is written over
        if source is None:
            return node
        node = source


def repeats(node: fx.Node) -> bool:
    """Whether Inductor will find that a node only repeats an argument: ``x * 1``, or a slice written over
    everything. Our own rewrites make such slices."""
    if node.target in NEUTRAL:
        return isinstance(node.args[0], fx.Node) and node.args[1] == NEUTRAL[node.target] and not node.kwargs
    if node.target is not aten.slice_scatter.default or not isinstance(node.args[1], fx.Node):
        return False
    base, source = tensor(node.args[0]), tensor(node.args[1])
    return None not in (base, source) and statically_known_true(sym_eq(base.shape, source.shape))


def reads_own_writes(graph: fx.Graph) -> Iterator[str]:
    """Functionalised ops that are given what they write by another argument too."""
    for node in graph.nodes:
        if node.target not in AUTO_FUNCTIONALIZED or not node.kwargs.get("_all_bases"):
            continue
        written = {origin(base) for base in node.kwargs["_all_bases"]}
        read = [a for k, v in node.kwargs.items() if k != "_all_bases" for a in nodes_in(v)]
        if any(origin(a) in written for a in read):
            yield f"{op_name(node)} reads a copy of what it writes"


def late_reads(graph: fx.Graph) -> Iterator[str]:
    """Values made of what a functionalised op writes, before it does, and read afterwards.

    Inductor keeps such a value as a formula over the memory it read; where the op needs it as well, it is
    computed again after the op, from the new content.
    """
    order = positions(graph)
    for call in graph.nodes:
        if call.target not in AUTO_FUNCTIONALIZED:
            continue
        for base in [b for b in call.kwargs.get("_all_bases") or () if isinstance(b, fx.Node)]:
            for value in formulas(origin(base), call, order):
                if late := [u for u in value.users if order[u] > order[call]]:
                    yield f"{late[0].name} reads {value.name}, made before {op_name(call)} writes {base.name}"


def formulas(root: fx.Node, call: fx.Node, order: dict[fx.Node, int]) -> set[fx.Node]:
    """What is computed from the memory of ``root`` before ``call`` by operations that may not be carried out
    before somebody needs them. Views are not among them: a later read of one keeps the op from reusing it."""
    found: set[fx.Node] = set()
    shows, todo = {root}, [root]
    while todo:
        node = todo.pop()
        for user in node.users:
            if user in found or user in shows or order[user] > order[call] or not delayed(user):
                continue
            (shows if node in shows and viewed(user) is node else found).add(user)
            todo.append(user)
    return found


def old_versions_read(graph: fx.Graph, copies: list[fx.Node]) -> Iterator[str]:
    """Formulas over what an input held before something was written into a part of it.

    Harmless where they end in that write alone and read the very rows it writes.
    """
    written = {node.args[0] for node in copies}
    for node in graph.nodes:
        for value, base in versions(node):
            maker = node if node.target in SCATTERS else value
            if first_version(base) not in written:
                continue
            for reader in formulas_over(base):
                if reader is not node and not (same_rows(reader, maker) and ends_in(reader, maker)):
                    yield f"{reader.name} reads {base.name}, a part of which {op_name(node)} writes"


def first_version(value: fx.Node) -> fx.Node:
    """The tensor that a value is a version of, through views and writes."""
    while True:
        value = origin(value)
        if value.target in SCATTERS:
            value = value.args[0]
        elif value.target is operator.getitem and value.args[0].target in AUTO_FUNCTIONALIZED:
            bases = [base for new, base in versions(value.args[0]) if new is value]
            if not bases:
                return value
            value = bases[0]
        else:
            return value


def formulas_over(base: fx.Node) -> list[fx.Node]:
    """The operations that read ``base``, or a view of it, and may be carried out later."""
    found, todo = [], [base]
    while todo:
        node = todo.pop()
        for user in node.users:
            if viewed(user) is node:
                todo.append(user)
            elif delayed(user) and not (user.target in SCATTERS and user.args[0] is node):
                found.append(user)
    return found


def ends_in(node: fx.Node, maker: fx.Node) -> bool:
    """Whether everything that is computed from ``node`` goes into ``maker``."""
    seen, todo = {node}, [node]
    while todo:
        for user in todo.pop().users:
            if user is not maker and not delayed(user):
                return False
            if user is not maker and user not in seen:
                seen.add(user)
                todo.append(user)
    return True


def same_rows(read: fx.Node, scatter: fx.Node) -> bool:
    """Whether ``read`` gathers the rows that ``scatter`` writes."""
    pairs = {
        aten.slice_scatter.default: (aten.slice.Tensor, ("dim", "start", "end", "step")),
        aten.select_scatter.default: (aten.select.int, ("dim", "index")),
        aten.index_copy.default: (aten.index_select.default, ("dim", "index")),
        aten.index_put.default: (aten.index.Tensor, ("indices",)),
        aten._unsafe_index_put.default: (aten._unsafe_index.Tensor, ("indices",)),
        aten.index_add.default: (aten.index_select.default, ("dim", "index")),
    }
    target, names = pairs.get(scatter.target, (None, ()))
    if read.target is not target:
        return False
    ours, theirs = arguments(read), arguments(scatter)
    return all(str(ours[name]) == str(theirs[name]) for name in names)


def delayed(node: fx.Node) -> bool:
    """Whether Inductor may keep the result of ``node`` as a formula."""
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace in ("aten", "prims")
        and target not in CARRIED_OUT
    )


def nodes_in(argument: object) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(argument, lambda n: found.append(n) or n)
    return found


def stale_copies(copies: list[fx.Node]) -> Iterator[str]:
    """Inputs that get the old content of another input, which was overwritten before."""
    overwritten: set[fx.Node] = set()
    for node in copies:
        target, source = node.args[:2]
        if isinstance(source, fx.Node) and origin(source) in overwritten:
            yield f"{target.name} gets what {origin(source).name} held before it was written"
        overwritten.add(target)


def lost_versions(graph: fx.Graph, copies: list[fx.Node]) -> Iterator[str]:
    """Scatters into an input that are read although something else ends in that input."""
    order = positions(graph)
    final = {node.args[0]: lineage(node.args[1]) for node in copies if isinstance(node.args[1], fx.Node)}
    for node in graph.nodes:
        for value, base in versions(node):
            ends = final.get(origin(base))
            if ends is None:
                continue
            if value not in ends and value.users:
                yield f"{op_name(node)} makes a version of {origin(base).name} that does not end in it"
            elif later := [
                u for u in value.users if u not in ends and overwrites(ends, value, order) < order[u]
            ]:
                yield f"{later[0].name} reads {value.name} after it was written over"


def versions(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The new contents a node makes, each with the tensor whose content it is a version of."""
    if node.target in SCATTERS and node.target is not aten.copy.default:
        yield from ((node, base) for base in node.args[:1] if isinstance(base, fx.Node))
    elif node.target in AUTO_FUNCTIONALIZED:
        bases = list(functional_bases(node))
        own = (
            max(1, len(node.args[0]._schema.returns))
            if isinstance(node.args[0], torch._ops.OpOverload)
            else 1
        )
        for user in node.users:
            if user.target is operator.getitem and 0 <= user.args[1] - own < len(bases):
                yield user, bases[user.args[1] - own]


def lineage(value: fx.Node) -> set[fx.Node]:
    """The versions that ``value`` is the last of: one written over the other."""
    found: set[fx.Node] = set()
    todo = [value]
    while todo:
        node = todo.pop()
        if node in found:
            continue
        found.add(node)
        source = origin(node)
        if source is not node:
            todo.append(source)
        elif node.target in SCATTERS:
            todo += [a for a in node.args[: 2 if node.target in PARTIAL else 1] if isinstance(a, fx.Node)]
        elif node.target is operator.getitem and node.args[0].target in AUTO_FUNCTIONALIZED:
            found.add(node.args[0])
            todo += [base for made, base in versions(node.args[0]) if made is node]
    return found


def overwrites(ends: set[fx.Node], value: fx.Node, order: dict[fx.Node, int]) -> float:
    """Where the next version after ``value`` is made."""
    made = [order[n] for n in ends if n is not value and order[n] > order[value] and makes_version(n)]
    return min(made, default=float("inf"))


def makes_version(node: fx.Node) -> bool:
    return node.target in SCATTERS or node.target in AUTO_FUNCTIONALIZED
