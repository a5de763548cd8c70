"""A placeholder that a pass adds goes last, once for each key, and is noted for the caller's side."""

import pytest
import torch
from k3compile.passes.extra_inputs import ExtraInput, add_input
from k3compile.passes.runner import Context


def graph_of(function):
    return torch.fx.symbolic_trace(function)


def test_it_follows_the_other_placeholders_and_is_noted():
    gm, ctx, example = graph_of(lambda x, y: x + y), Context("dynamo"), torch.zeros(2, dtype=torch.int32)
    node = add_input(gm, "offset", "export_offset", example, ctx)
    gm.graph.lint()
    assert gm.graph.find_nodes(op="placeholder")[-1] is node
    assert ctx.extra_inputs == [ExtraInput("offset", "export_offset", example)]
    assert node._dynamo_source is None
    assert node.meta["example_value"].shape == (2,)


def test_a_key_has_one_placeholder_and_another_key_another():
    gm, ctx = graph_of(lambda x: x + 1), Context("dynamo")
    first = add_input(gm, "offset", "a", torch.zeros(1), ctx)
    assert add_input(gm, "offset", "a", torch.zeros(1), ctx) is first
    assert add_input(gm, "offset", "b", torch.zeros(1), ctx) is not first
    assert [extra.key for extra in ctx.extra_inputs] == ["a", "b"]


def test_a_graph_without_inputs_gets_its_first():
    gm, ctx = graph_of(lambda: torch.ones(1)), Context("dynamo")
    node = add_input(gm, "offset", "a", torch.zeros(1), ctx)
    gm.graph.lint()
    assert next(iter(gm.graph.nodes)) is node


def test_only_a_dynamo_graph_takes_one():
    with pytest.raises(AssertionError, match="AOTAutograd"):
        add_input(graph_of(lambda x: x), "offset", "a", torch.zeros(1), Context("aten"))
