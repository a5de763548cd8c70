"""Open an op: put its meaning into the graph as ATen, so that the inner compiler can fuse it.

    %y = k3.rms_norm(%x, %w, eps)      ->      %sq = aten.pow(%x, 2); %m = aten.mean(%sq, ...); ...; %y = ...

The meaning is traced under the graph's own fake mode, with the sizes the graph already has. Tracing may add
no guard: what would need one is refused, and the op stays.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from k3compile.passes.graph import value
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq
from torch.utils import _pytree as pytree

Table = Mapping[Any, Callable[..., Any]]
KEPT_META = ("stack_trace", "nn_module_stack", "from_node", "seq_nr")


class CannotOpen(ValueError):
    """Why an op stays as it is."""


def open_node(
    gm: fx.GraphModule, node: fx.Node, form: Callable[..., Any], fake_mode: FakeTensorMode, table: Table
) -> None:
    """Replace ``node`` by the ATen nodes of ``form``, called with the node's arguments.

    table: decompositions to trace with. Raises CannotOpen, leaving the graph as it was, where the form needs
    a guard, looks at data, keeps a constant, or returns another dtype, size or stride than was declared.
    """
    holes = [a for a in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(a, fx.Node)]
    traced = trace(node, form, holes, fake_mode, table)
    results = check_results(traced, node)
    copied = inline(gm, node, traced, holes)
    replace_results(node, [copied[r] for r in results])


def trace(
    node: fx.Node, form: Callable[..., Any], holes: list[fx.Node], fake_mode: FakeTensorMode, table: Table
) -> fx.GraphModule:
    """The form as a graph whose inputs are ``holes``, the nodes among the arguments, in order."""
    flat, spec = pytree.tree_flatten((node.args, node.kwargs))

    def call(*values: Any) -> Any:
        given = iter(values)
        args, kwargs = pytree.tree_unflatten(
            [next(given) if isinstance(a, fx.Node) else a for a in flat], spec
        )
        return form(*args, **kwargs)

    values = [hole.meta["val"] for hole in holes]
    try:
        with (
            torch.no_grad(),
            fake_mode,
            enable_python_dispatcher(),
            fake_mode.shape_env.error_on_new_guards(),
        ):
            return make_fx(call, decomposition_table=dict(table))(*values)
    except (RuntimeError, AssertionError) as error:  # what tracing raises for guards, data and constants
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CannotOpen(f"its meaning cannot be traced here: {first}") from error


def check_results(traced: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    """The traced results, one for each value the node declared. Raises CannotOpen where they differ."""
    for name, constant in traced.__dict__.items():
        if isinstance(constant, FakeTensor):
            raise CannotOpen(f"its meaning keeps a constant made while tracing ({name})")
    (output,) = traced.graph.find_nodes(op="output")
    returned = pytree.tree_leaves(output.args[0])
    declared = pytree.tree_leaves(node.meta["val"])
    if len(returned) != len(declared):
        raise CannotOpen(f"its meaning returns {len(returned)} values, it declares {len(declared)}")
    for result, expected in zip(returned, declared):
        if not isinstance(result, fx.Node) or not same_layout(value(result), expected):
            raise CannotOpen(f"its meaning returns {layout(value(result))}, it declares {layout(expected)}")
    return returned


def inline(
    gm: fx.GraphModule, node: fx.Node, traced: fx.GraphModule, holes: list[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Copy the traced nodes before ``node``; traced node -> node of ``gm``."""
    copied = dict(zip(traced.graph.find_nodes(op="placeholder"), holes, strict=True))
    origin = {k: node.meta[k] for k in KEPT_META if k in node.meta}
    with gm.graph.inserting_before(node):
        for old in traced.graph.nodes:
            if old.op == "get_attr":
                name = fresh_attribute(gm, old.target)
                setattr(gm, name, getattr(traced, old.target))
                new = gm.graph.get_attr(name)
            elif old.op == "call_function":
                new = gm.graph.node_copy(old, copied.__getitem__)
            else:
                continue
            new.meta = old.meta | origin
            copied[old] = new
    return copied


def replace_results(node: fx.Node, results: list[fx.Node]) -> None:
    """Let every reader of ``node`` read ``results`` and erase it."""
    if isinstance(node.meta["val"], (tuple, list)):
        for user in list(node.users):
            assert user.target is operator.getitem, f"{user} reads the tuple {node} as a whole"
            user.replace_all_uses_with(results[user.args[1]])
            node.graph.erase_node(user)
    else:
        node.replace_all_uses_with(results[0])
    node.graph.erase_node(node)


def fresh_attribute(gm: fx.GraphModule, name: str) -> str:
    count = 0
    while hasattr(gm, f"{name}_{count}"):
        count += 1
    return f"{name}_{count}"


def same_layout(a: Any, b: Any) -> bool:
    """Whether two fake values have provably the same dtype, sizes and strides."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b)
    if a.dtype != b.dtype or a.device != b.device or a.dim() != b.dim():
        return False
    return statically_known_true(sym_eq(a.shape, b.shape)) and statically_known_true(
        sym_eq(a.stride(), b.stride())
    )


def layout(of: Any) -> str:
    """A fake value as text."""
    if not isinstance(of, torch.Tensor):
        return str(of)
    return f"{of.dtype} {list(of.shape)} stride {list(of.stride())}"
