"""Who sees through a view, who writes what, and which copies cannot become views."""

import operator

import pytest
import torch
from compiled import Compiled
from k3compile.passes.aliasing import (
    Aliases,
    base_behind,
    depends,
    functional_bases,
    passes_through,
    storage_of,
)

aten = torch.ops.aten


def graph_of(fn, *args, **options):
    compiled = Compiled(fn, (), **options)
    compiled(*args)
    return compiled.graphs[0].graph


def first(graph, target):
    return next(n for n in graph.nodes if n.target is target)


def test_a_family_is_all_views_and_all_copies_of_the_same_kind():
    def f(x):
        y = x.index_select(0, torch.arange(2))
        return y.view(-1).split(2)[0] + 1, y.clone() * 2, y.double() - 1, y + 3

    graph = graph_of(f, torch.rand(4, 2))
    family = Aliases(graph).family(first(graph, aten.index_select.default))
    targets = {n.target for n in family}
    assert {aten.index_select.default, aten.view.default, operator.getitem, aten.clone.default} <= targets
    assert not targets & {aten.add.Tensor, aten.mul.Tensor, aten._to_copy.default}


def test_writers_are_in_place_writes_functionalised_ops_and_scatters(rev_into):
    def f(x, y):
        rev_into(y, x)
        x.index_copy_(0, torch.tensor([1]), y[:1])
        return y + 1

    graph = graph_of(f, torch.rand(4, 2), torch.rand(4, 2))
    y, x = (n for n in graph.nodes if n.op == "placeholder")  # in the order of their first use
    writers = [n.target for n in Aliases(graph).writers(x)]
    assert writers == [torch.ops.higher_order.auto_functionalized_v2, aten.copy_.default]
    assert Aliases(graph).writers(y) == []


def test_what_an_unknown_higher_order_op_takes_may_be_written():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    loop = graph.call_function(torch.ops.higher_order.while_loop, (x,))
    assert list(functional_bases(loop)) == [x]


def test_fresh_memory_is_made_here_and_is_no_view(rev_into):
    def f(x, y):
        made = torch.zeros(4, 2)
        half = made[:2]
        rev_into(y, x)
        return torch.index_copy(made, 0, torch.tensor([1]), y[:1]) + half.sum() + x + 1

    graph = graph_of(f, torch.rand(4, 2), torch.rand(4, 2))
    aliases = Aliases(graph)
    fresh = {n.name: aliases.fresh(n) for n in graph.nodes if storage_of(n) is not None}
    assert not fresh["arg0_1"]
    assert not fresh["slice_1"]
    assert not fresh["getitem_1"], "an input after an op wrote it"
    assert fresh["index_copy"]
    assert fresh["add"]


def test_the_base_behind_an_item_is_counted_after_the_ops_own_results(rev_into):
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    functional = torch.ops.higher_order.auto_functionalized_v2
    for op, own in ((torch.ops.k3test.rev_into.default, 1), (aten.aminmax.default, 2)):
        call = graph.call_function(functional, (op,), {"_all_bases": [x, y]})
        items = [graph.call_function(operator.getitem, (call, place)) for place in range(own + 2)]
        assert [base_behind(item) for item in items] == [None] * own + [x, y]


def test_order_keeps_up_with_replacements():
    graph = graph_of(lambda x: ((x + 1) * 2).neg(), torch.rand(3))
    add, mul, neg = (n for n in graph.nodes if n.op == "call_function")
    aliases = Aliases(graph)
    with graph.inserting_before(mul):
        new = graph.call_function(aten.sub.Tensor, (add, 1))
    aliases.replaced(mul, new, mul)
    assert aliases.before(add, new)
    assert aliases.before(new, neg)


def test_dependence_is_transitive():
    graph = graph_of(lambda x, y: (x + 1).neg() * y, torch.rand(3), torch.rand(3))
    x, y = (n for n in graph.nodes if n.op == "placeholder")
    neg = first(graph, aten.neg.default)
    assert depends(neg, x)
    assert not depends(neg, y)


@pytest.mark.parametrize(
    ("target", "shares"),
    [
        (aten.view.default, True),
        (aten.slice.Tensor, True),
        (aten.clone.default, True),
        (aten._unsafe_view.default, True),
        (aten.add.Tensor, False),
        (torch.ops.k3.l2_norm.default if hasattr(torch.ops.k3, "l2_norm") else aten.neg.default, False),
    ],
    ids=str,
)
def test_what_may_share_memory_with_its_argument(target, shares):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.rand(2)
    node = graph.call_function(target, (x, 1))
    node.meta["val"] = torch.rand(2)
    assert passes_through(node, x) is shares


def test_a_copy_to_another_dtype_is_never_dropped():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.rand(2)
    node = graph.call_function(aten._to_copy.default, (x,), {"dtype": torch.float64})
    node.meta["val"] = torch.rand(2).double()
    assert not passes_through(node, x)
