"""Every spelling of a gather or scatter by an index is found, with what it reads and writes."""

import pytest
import torch
from compiled import Compiled
from k3compile.passes.index_sites import site_nodes, site_of


def sites(fn, **options):
    compiled = Compiled(fn, (), **options)
    compiled(torch.rand(4, 3), torch.tensor([2, 0]), torch.rand(2, 3))
    return [site_of(node) for node in site_nodes(compiled.graphs[0].graph)]


BOTH = pytest.mark.parametrize("decompose", [False, True])


@BOTH
def test_gathers(decompose):
    def f(x, i, y):
        return x.index_select(0, i) + 1, x.index_select(-1, i) + 1, x[i] + 1, x[:, i] + 1

    found = sites(f, decompose=decompose)
    assert [s.dim for s in found] == [0, 1, 0, 1]
    assert all(s.is_gather and s.problem is None and s.base.name == "arg0_1" for s in found)
    assert all(s.index.name == "arg1_1" for s in found)


@BOTH
def test_scatters(decompose):
    def f(x, i, y):
        x = torch.index_copy(x, 0, i, y) + 1
        return x.index_put((i,), y) + 1

    found = sites(f, decompose=decompose)
    assert [s.dim for s in found] == [0, 0]
    assert not any(s.is_gather for s in found)
    assert all(s.source.name == "arg2_1" for s in found)


@pytest.mark.parametrize(
    ("fn", "problem"),
    [
        (lambda x, i, y: x[i, i], "2 dimensions are indexed at once"),
        (lambda x, i, y: x[i[None]], "the index has 2 dimensions"),
        (lambda x, i, y: x.index_put((i,), y, accumulate=True), "it accumulates"),
    ],
)
def test_what_is_no_candidate_says_why(fn, problem):
    assert [s.problem for s in sites(fn)] == [problem]


def test_a_mask_and_a_scalar_are_no_candidates():
    graph = torch.fx.Graph()
    x, i = graph.placeholder("x"), graph.placeholder("i")
    x.meta["val"], i.meta["val"] = torch.rand(4), torch.tensor([True, False, True, True])
    node = graph.call_function(torch.ops.aten.index.Tensor, (x, [i]))
    assert site_of(node).problem == "the index is a mask"
    x.meta["val"], i.meta["val"] = torch.tensor(1.0), torch.tensor([0])
    node = graph.call_function(torch.ops.aten.index_select.default, (x, 0, i))
    assert site_of(node).problem == "the tensor has no dimensions"


def test_writes_in_place_are_sites_of_a_graph_that_is_not_functional():
    graph = torch.fx.Graph()
    x, i, y = (graph.placeholder(n) for n in "xiy")
    x.meta["val"], i.meta["val"], y.meta["val"] = torch.rand(4), torch.tensor([0]), torch.rand(1)
    node = graph.call_function(torch.ops.aten.index_copy_.default, (x, 0, i, y))
    assert site_nodes(graph) == [node]
    assert site_of(node).problem == "it writes in place: the graph is not functional"
