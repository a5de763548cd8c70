"""Nodes: values, new calls, arguments by name; and nothing that matters is taken for dead."""

import operator

import pytest
import torch
from compiled import Compiled
from k3compile.passes.graph import (
    arguments,
    emit,
    fake_mode_of,
    op_name,
    removable,
    remove_dead,
    schema_writes,
)
from torch import fx

aten = torch.ops.aten
PURE = [aten.add.Tensor, aten.index_select.default, operator.add, operator.getitem]
KEPT = [
    aten.copy_.default,
    aten.index_copy_.default,
    aten._assert_scalar.default,
    aten.bernoulli.default,
    aten.rand.default,
    torch.ops._c10d_functional.all_reduce.default,
    operator.setitem,
    operator.iadd,
    torch.relu_,
    torch.add,
]


def call(target, *args):
    graph = fx.Graph()
    return graph.call_function(target, args or (graph.placeholder("x"),))


def name_of(target):
    """Without an address, or two processes would collect different tests."""
    return target if isinstance(target, str) else getattr(target, "__qualname__", None) or str(target)


@pytest.mark.parametrize("target", PURE, ids=name_of)
def test_unused_pure_calls_go(target):
    assert removable(call(target))


@pytest.mark.parametrize("target", KEPT, ids=name_of)
def test_unused_calls_that_do_something_stay(target):
    assert not removable(call(target))


def test_methods_modules_and_data_dependent_sizes_stay():
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert not removable(graph.call_method("index_copy_", (x,)))
    assert not removable(graph.call_method("add", (x,)))
    assert not removable(graph.call_module("layer", (x,)))
    size = graph.call_function(aten._local_scalar_dense.default, (x,))
    size.meta["unbacked_bindings"] = {"u0": ()}
    assert not removable(size)


def test_a_chain_dies_from_its_end_and_writes_survive():
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(aten.neg.default, (x,))
    graph.call_function(aten.abs.default, (a,))
    written = graph.call_function(aten.neg.default, (x,))
    graph.call_function(aten.copy_.default, (x, written))
    graph.output((x,))
    assert remove_dead(graph) == 2
    assert [n.target for n in graph.nodes if n.op == "call_function"] == [
        aten.neg.default,
        aten.copy_.default,
    ]


def test_arguments_have_names_and_defaults():
    graph = fx.Graph()
    x = graph.placeholder("x")
    named = arguments(graph.call_function(aten.slice.Tensor, (x, 1), {"end": 4}))
    assert named == {"self": x, "dim": 1, "start": None, "end": 4, "step": 1}


def test_writes_are_read_from_the_schema():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    assert list(schema_writes(graph.call_function(aten.copy_.default, (x, y)))) == [x]
    assert list(schema_writes(graph.call_function(aten.add.Tensor, (x, y)))) == []


def test_a_new_call_knows_its_value_and_where_it_comes_from():
    compiled = Compiled(lambda x: x.index_select(0, torch.arange(2)) + 1, ())
    compiled(torch.rand(6, 2))
    graph = compiled.graphs[0].graph
    old = next(n for n in graph.nodes if n.target is aten.index_select.default)
    with graph.inserting_before(old):
        new = emit(graph, aten.slice.Tensor, (old.args[0], 0, 0, 2), like=old, mode=fake_mode_of(graph))
    assert new.meta["val"].shape == (2, 2)
    assert new.meta["stack_trace"] == old.meta["stack_trace"]
    assert new.meta["val"].untyped_storage()._cdata == old.args[0].meta["val"].untyped_storage()._cdata


def test_ops_are_called_what_people_call_them():
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert op_name(graph.call_function(aten.add.Tensor, (x, 1))) == "aten.add"
    assert op_name(graph.call_method("index_copy_", (x,))) == "index_copy_"
    assert op_name(graph.call_function(operator.getitem, (x, 0))) == "getitem"
    assert op_name(x) == "placeholder"
    functional = torch.ops.higher_order.auto_functionalized_v2
    assert op_name(graph.call_function(functional, (aten.copy_.default,))) == "aten.copy_"
