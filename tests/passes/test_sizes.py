"""Sizes are looked up before they are computed, and only what can be computed is."""

import operator

import pytest
import torch
from compiled import Compiled
from k3compile.passes.graph import value
from k3compile.passes.prover import expr
from k3compile.passes.sizes import Sizes


@pytest.fixture
def graph():
    def f(x, spans):
        a, b = spans[0].item(), spans[1].item()
        torch._check(a >= 0)
        torch._check(b >= 0)
        return x.new_zeros(a), x.new_zeros(b), x * (a + b)

    compiled = Compiled(f, (), unbacked="L['x']:0")
    compiled(torch.rand(5), torch.tensor([1, 2]))
    return compiled.graphs[0].graph


def items(graph):
    return [n for n in graph.nodes if "_local_scalar_dense" in str(n.target)]


def test_a_size_that_exists_is_found(graph):
    a, b = items(graph)
    last = graph.output_node()
    count = len(graph.nodes)
    assert Sizes(graph).at(value(a), last) is a
    assert expr(value(Sizes(graph).at(value(a) + value(b), last))) == expr(value(a) + value(b))
    assert Sizes(graph).at(7, last) == 7
    assert len(graph.nodes) == count


def test_a_size_that_is_computed_too_late_is_not_used(graph):
    a, b = items(graph)
    assert Sizes(graph).at(value(b), a) is None


def test_a_sum_is_built_once(graph):
    a, b = items(graph)
    last, sizes = graph.output_node(), Sizes(graph)
    wanted = 2 * value(a) + value(b) + 3
    built = sizes.at(wanted, last)
    assert built.target is operator.add
    assert expr(value(built)) == expr(wanted)
    assert sizes.at(wanted, last) is built
    graph.lint()


def test_what_no_node_leads_to_is_not_made_up(graph):
    a, _ = items(graph)
    assert Sizes(graph).at(value(a) // 2, graph.output_node()) is None
