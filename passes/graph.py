"""Small operations on FX graphs that every pass needs: values, new nodes, arguments by name, dead code.

A node's value is the fake tensor or symbolic size in ``meta["val"]`` (``meta["example_value"]`` in Dynamo
graphs). New nodes are made by :func:`emit`, which computes that value and keeps where the user's code was;
a node's target and arguments are never edited in place, since Inductor caches what it derived from them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

AUTO_FUNCTIONALIZED = (auto_functionalized, auto_functionalized_v2)
OWN_META = {"val", "example_value", "tensor_meta", "unbacked_bindings", "eager_input_vals"}
IN_PLACE_OPERATORS = {operator.setitem, operator.delitem} | {
    getattr(operator, name)
    for name in dir(operator)
    if name.startswith("i") and f"__{name}__" in dir(operator)
}


def value(arg: Any) -> Any:
    """The value of a node, or a constant itself; None for a node without one."""
    if not isinstance(arg, fx.Node):
        return arg
    return arg.meta.get("val", arg.meta.get("example_value"))


def tensor(arg: Any) -> FakeTensor | None:
    """The fake tensor of a node, None for anything else."""
    found = value(arg)
    return found if isinstance(found, torch.Tensor) else None


def storage_id(found: torch.Tensor | None) -> int | None:
    """Which memory a tensor sits in; None for one without its own: sparse, or wrapped by functorch."""
    if found is None:
        return None
    try:
        return found.untyped_storage()._cdata
    except NotImplementedError:
        return None


def values(args: Any) -> Any:
    """Arguments with every node replaced by its value."""
    return fx.map_arg(args, value)


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode | None:
    """The mode of the first fake tensor in ``graph``."""
    for node in graph.nodes:
        if isinstance(found := value(node), FakeTensor):
            return found.fake_mode
    return None


def emit(
    graph: fx.Graph,
    target: Any,
    args: tuple,
    kwargs: Mapping[str, Any] | None = None,
    *,
    like: fx.Node,
    mode: FakeTensorMode | None,
    known: Any = None,
) -> fx.Node:
    """A new call at the graph's insertion point, standing where ``like`` stood in the user's code.

    The value is computed under ``mode`` unless ``known`` gives it.
    """
    node = graph.call_function(target, args, dict(kwargs or {}))
    node.meta.update({k: v for k, v in like.meta.items() if k not in OWN_META})
    node.meta["val"] = infer(node, mode) if known is None else known
    return node


def infer(node: fx.Node, mode: FakeTensorMode | None) -> Any:
    """What ``node`` computes on the values of its arguments."""
    with mode or nullcontext():
        return node.target(*values(node.args), **values(node.kwargs))


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an OpOverload call by the names of its schema, defaults included."""
    named = dict(node.kwargs)
    for position, argument in enumerate(node.target._schema.arguments):
        if position < len(node.args):
            named[argument.name] = node.args[position]
        elif argument.name not in named and argument.has_default_value():
            named[argument.name] = argument.default_value
    return named


def positions(graph: fx.Graph) -> dict[fx.Node, int]:
    """Where each node stands."""
    return {node: place for place, node in enumerate(graph.nodes)}


def op_name(node: fx.Node) -> str:
    """The name people know a node's operation by: ``aten.index_select``, ``k3.kda_prefill``,
    ``index_copy_``."""
    target = node.target
    if target in AUTO_FUNCTIONALIZED and node.args:
        target = node.args[0]
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._opname}"
    if node.op in ("call_method", "placeholder", "get_attr"):
        return str(target) if node.op == "call_method" else node.op
    return getattr(target, "__name__", str(target))


def schema_writes(node: fx.Node) -> Iterator[fx.Node]:
    """Nodes that an OpOverload call changes in place."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return
    if not node.target._schema.is_mutable:
        return
    named = arguments(node)
    for argument in node.target._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed = named.get(argument.name)
            yield from (
                n for n in (changed if isinstance(changed, (list, tuple)) else [changed]) if n is not None
            )


def removable(node: fx.Node) -> bool:
    """Whether nothing is lost when an unused ``node`` goes. Only what is known to be pure is removed.

    Calls that write in place, draw random numbers, communicate, bind a data-dependent size, or are unknown
    here stay: an in-place call in a graph that was not functionalised may well have no users.
    """
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or node.meta.get("unbacked_bindings") or node.is_impure():
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        collective = node.target.namespace.startswith("_c10d")  # other ranks wait for it
        return not collective and torch.Tag.nondeterministic_seeded not in node.target.tags
    from_operator = getattr(node.target, "__module__", None) == "_operator"
    return node.target in AUTO_FUNCTIONALIZED or (from_operator and node.target not in IN_PLACE_OPERATORS)


def remove_dead(graph: fx.Graph) -> int:
    """Erase unused nodes that are :func:`removable`; returns how many went."""
    removed = 0
    for node in reversed(graph.nodes):
        if not node.users and removable(node):
            graph.erase_node(node)
            removed += 1
    return removed
