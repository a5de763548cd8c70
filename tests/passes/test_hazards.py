"""The graphs that Inductor would compute wrongly are found, and no other graph of ours is."""

import pytest
import torch
from compiled import Compiled
from hazard_programs import REFUSED_TOO, RIGHT, WRONG, arguments
from k3compile.passes.aliasing import COPIES
from k3compile.passes.hazards import hazards, lineage, origin, versions
from k3compile.passes.in_place import functional_writes
from k3compile.passes.pipeline import ATEN_PASSES
from lanes import slow
from mixed_batch import MIXES, UNBACKED, inputs, layer
from ordinary_programs import ordinary

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("rev_into")


def graph_of(fn, passes=(), **options):
    compiled = Compiled(fn, passes, decompose=True, **options)
    compiled(*arguments(fn))
    return compiled.graphs[0].graph


def without_copies(graph):
    """As Inductor leaves a graph before it calls our passes: clones that look superfluous are gone."""
    for node in list(graph.nodes):
        if node.target in COPIES or node.target is aten.copy.default:
            node.replace_all_uses_with(node.args[node.target is aten.copy.default])
            graph.erase_node(node)
    return graph


@pytest.mark.parametrize("passes", [slow(()), ATEN_PASSES], ids=["as captured", "after our passes"])
@pytest.mark.parametrize("fn", WRONG, ids=lambda fn: fn.__name__)
def test_a_hazard_is_named_with_its_clones_and_without(fn, passes):
    says = WRONG[fn]
    kept = hazards(graph_of(fn, passes))
    gone = hazards(without_copies(graph_of(fn, passes)))
    assert any(says in hazard for hazard in gone), gone
    if says != "held before it was written":  # where the copy is still there, so is the old value
        assert any(says in hazard for hazard in kept), kept


@pytest.mark.parametrize("passes", [(), ATEN_PASSES], ids=["as captured", "after our passes"])
@pytest.mark.parametrize("fn", RIGHT, ids=lambda fn: fn.__name__)
def test_what_inductor_computes_rightly_is_left_to_it(fn, passes):
    assert hazards(graph_of(fn, passes)) == []


@pytest.mark.parametrize("fn", REFUSED_TOO, ids=lambda fn: fn.__name__)
def test_the_rules_are_wider_than_the_mistakes(fn):
    assert hazards(graph_of(fn))


@pytest.mark.parametrize("name", ordinary())
def test_what_ordinary_models_write_is_left_to_inductor(name):
    """A false alarm would cost the graph all of Inductor's fusion."""
    one = ordinary()[name]
    compiled = Compiled(one.fn, ATEN_PASSES, decompose=True)
    compiled(*one.args)
    (gm,) = compiled.graphs
    assert gm.graph.find_nodes(op="call_function", target=aten.copy_.default), "it writes an input"
    assert hazards(gm.graph) == []
    assert hazards(without_copies(gm.graph)) == []


def test_a_mixed_batch_has_none_before_or_after_our_passes():
    for passes in ((), ATEN_PASSES):
        compiled = Compiled(layer, passes, decompose=True, unbacked=UNBACKED)
        compiled(*inputs(*MIXES[0]))
        (gm,) = compiled.graphs
        assert functional_writes(gm.graph), "the layer writes its pools"
        assert hazards(gm.graph) == []


def test_an_origin_is_found_through_views_and_droppable_copies():
    graph = graph_of(lambda x, y: x.t().clone()[1:] + y[1:].double().float()[:, :4].t()[1:, :].t().sum())
    (add,) = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    assert origin(add.args[0]).op == "placeholder"
    assert origin(add) is add


def test_a_lineage_goes_through_parts_that_are_written_back():
    def columns(x, y):
        x[:, 1:3].index_copy_(0, torch.arange(4), y[:, :2])
        return x.sum()

    graph = graph_of(columns)
    (copy,) = graph.find_nodes(op="call_function", target=aten.copy_.default)
    made = [value for node in graph.nodes for value, _ in versions(node)]
    assert len(made) == 2, "the part, and the whole"
    assert set(made) <= lineage(copy.args[1])
