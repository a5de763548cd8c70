"""After the last pass: let mutating ops write into the tensors they were given, where nobody can tell.

    %f = auto_functionalized_v2(k3.kda_prefill, ..., _all_bases=[%state])
    %o = %f[0]; %new = %f[1]                                        ->  %o = k3.kda_prefill(..., %state)
    copy_(%state, %new)

Executed as it stands, the functional form clones every state pool on every call. Inductor undoes it itself;
for the other inner compilers this does. A base is written in place when

 * it is an input whose new value ends in that input (the ``copy_``), or a tensor made in this graph;
 * nothing reads the old value after the op, nor does the op itself read it by another argument;
 * the new value of an input is not returned: the caller would hold an alias instead of a tensor of its own.

Any other base stays functional: it is cloned, and the answer is the same.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass

import torch
from k3compile.passes.graph import storage_id, tensor
from k3compile.passes.written_view import written_view
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2, get_mutable_args
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

COPY = torch.ops.aten.copy_.default
Storages = dict[int | None, list[fx.Node]]  # fake storage -> the nodes whose value sits in it


@dataclass(frozen=True)
class Written:
    """One base of one mutating op: the op, the base, and why it stays a clone (None: written in place)."""

    op: str
    node: str
    base: str
    refusal: str | None


def write_in_place(gm: fx.GraphModule) -> list[Written]:
    """Undo ``auto_functionalized_v2`` where that is provably unseen; one entry a base, in graph order."""
    found = []
    storages = nodes_by_storage(gm.graph)
    for node in functional_writes(gm.graph):
        bases = node.kwargs["_all_bases"]
        refusals = [refusal(node, base, bases, storages) for base in bases]
        for base, why in zip(bases, refusals):
            found.append(Written(str(node.args[0]), node.name, base.name, why))
        for index, (base, why) in enumerate(zip(bases, refusals)):
            if why is None:
                read_base_instead(node, index, base)
        if any(refusals) or has_list_argument(node):
            cloned = tuple(i for i, why in enumerate(refusals) if why)
            node.kwargs = {**node.kwargs, "_only_clone_these_bases": cloned}
        else:
            call_directly(node)
    gm.graph.lint()
    return found


def functional_writes(graph: fx.Graph) -> list[fx.Node]:
    """The ``auto_functionalized_v2`` nodes of library ops, in order."""
    nodes = graph.find_nodes(op="call_function", target=auto_functionalized_v2)
    return [n for n in nodes if isinstance(n.args[0], torch._ops.OpOverload) and n.kwargs.get("_all_bases")]


def refusal(node: fx.Node, base: fx.Node, bases: list[fx.Node], storages: Storages) -> str | None:
    """Why ``node`` may not write into ``base``, or None."""
    family = alias_family(base, storages)
    root = next(iter(family))
    if root is not base and root.op in ("placeholder", "get_attr"):
        return "it is a view of an input"
    if root.op == "get_attr":
        return "it is a constant"
    if sum(b in family for b in bases) > 1:
        return "two written arguments share it"
    reads = [v for k, v in node.kwargs.items() if k != "_all_bases"]
    if any(a in family for a in pytree.tree_leaves(reads) if isinstance(a, fx.Node)):
        return "the op also reads it by another argument"
    if later := [u for m in family for u in m.users if u > node and not is_target_of_copy(u, m)]:
        return f"{min(later).name} reads its old value later"
    if root.op != "placeholder":
        return None
    if not any(u > node and is_target_of_copy(u, base) for u in base.users):
        return "its new value does not end in the input"
    new = [n for value in new_values(node, bases.index(base)) for n in alias_family(value, storages)]
    if any(n in new for n in node.graph.find_nodes(op="output")[0].all_input_nodes):
        return "its new value is returned"
    return None


def nodes_by_storage(graph: fx.Graph) -> Storages:
    """Nodes whose fake values sit in the same storage."""
    found: Storages = defaultdict(list)
    for node in graph.nodes:
        found[storage_id(tensor(node))].append(node)
    del found[None]
    return found


def alias_family(node: fx.Node, storages: Storages) -> dict[fx.Node, None]:
    """All nodes that may share memory with ``node``, the one that owns the memory first.

    Two inputs may sit in one storage, as the pools of all layers do. AOTAutograd made sure that they do not
    overlap, or they would be one input.
    """
    root = root_of(node)
    family, todo = {root: None, node: None}, [root, node]
    while todo:
        member = todo.pop()
        views = [u for u in member.users if viewed(u) in family]
        for near in (*views, *storages.get(storage_id(tensor(member)), ())):
            if near not in family and (root_of(near) is root or root_of(near).op != "placeholder"):
                family[near] = None
                todo.append(near)
    return family


def root_of(node: fx.Node) -> fx.Node:
    """The node that owns the memory, by schemas."""
    while (parent := viewed(node)) is not None:
        node = parent
    return node


def viewed(node: fx.Node) -> fx.Node | None:
    """The node whose memory ``node`` is a view of, by its schema; None when it owns its memory."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:  # a part of a multi-output view such as split
        source = node.args[0]  # None in a node that was erased
        splits = source is not None and isinstance(source.target, torch._ops.OpOverload)
        return viewed(source) if splits else None
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    schema = node.target._schema
    if not any(r.alias_info for r in schema.returns):
        return None
    for argument, value in zip(schema.arguments, node.args):
        if argument.alias_info and isinstance(value, fx.Node):
            return value
    return None


def is_target_of_copy(node: fx.Node, argument: fx.Node) -> bool:
    """Whether ``argument`` is only written by ``node``."""
    return node.target is COPY and node.args[0] is argument and node.args[1] is not argument


def new_values(node: fx.Node, index: int) -> list[fx.Node]:
    """The getitems that hold base ``index`` as the op left it."""
    place = max(1, len(node.args[0]._schema.returns)) + index
    return [u for u in node.users if u.target is operator.getitem and u.args[1] == place]


def read_base_instead(node: fx.Node, index: int, base: fx.Node) -> None:
    """Let readers of the new value read ``base``, which now holds it; drop the copy onto itself."""
    for value in new_values(node, index):
        value.replace_all_uses_with(base)
        node.graph.erase_node(value)
    for copy in [u for u in base.users if u.target is COPY and u.args[:2] == (base, base)]:
        copy.replace_all_uses_with(base)
        node.graph.erase_node(copy)


def has_list_argument(node: fx.Node) -> bool:
    names, _ = get_mutable_args(node.args[0])
    return any(f"_{name}_length" in node.kwargs for name in names)


def call_directly(node: fx.Node) -> None:
    """Replace the functional node by the op itself, on its bases or on the views it was given."""
    op, graph = node.args[0], node.graph
    names, _ = get_mutable_args(op)
    returns = len(op._schema.returns)
    with graph.inserting_before(node):
        views = {name: view_of_base(node, name) for name in names}
        plain = {a.name: node.kwargs[a.name] for a in op._schema.arguments if a.name in node.kwargs}
        call = graph.call_function(op, (), plain | views)
        call.meta = {k: v for k, v in node.meta.items() if k not in ("val", "eager_input_vals")}
        values = node.meta["val"]
        call.meta["val"] = values[0] if returns <= 1 else tuple(values[:returns])
    for user in list(node.users):
        place = user.args[1]
        if returns <= 1:
            user.replace_all_uses_with(call)
        else:
            with graph.inserting_before(user):
                part = graph.call_function(operator.getitem, (call, place))
                part.meta = dict(user.meta)
            user.replace_all_uses_with(part)
        graph.erase_node(user)
    graph.erase_node(node)


def view_of_base(node: fx.Node, name: str) -> fx.Node | None:
    """A node for the written argument ``name``, or None where it was given no tensor."""
    found = written_view(node, name)
    if found is None or found.view is None:
        return found and found.base
    return with_value(node.graph.call_function(found.view, (found.base, *found.where)))


def with_value(node: fx.Node) -> fx.Node:
    """Infer the fake value of a new view."""
    args = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], node.args)
    node.meta["val"] = node.target(*args)
    return node


def unsafe_views(graph: fx.Graph) -> list[str]:
    """Written arguments that are strided views with a data-dependent offset, as ``op(argument)``.

    Inductor 2.13 drops such an offset and writes at the start of the base, without a word.
    """
    found = []
    for node in functional_writes(graph):
        for name in get_mutable_args(node.args[0])[0]:
            offset = node.kwargs.get(f"_{name}_storage_offset")
            value = offset.meta["val"] if isinstance(offset, fx.Node) else offset
            if isinstance(value, torch.SymInt) and free_unbacked_symbols(value):
                found.append(f"{node.args[0]}({name})")
    return found
