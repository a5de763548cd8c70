"""An input that a pass adds is supplied at each call, and the caller's signature does not change."""

import pytest
import torch
from k3compile.passes import pipeline
from k3compile.passes.extra_inputs import ExtraInput, add_input
from k3compile.passes.remarks import PassResult

from k3compile import backend, extra_inputs


class AddBias:
    """Adds an input and adds it to the output: what a pass with an extra input looks like."""

    name, level, keeps = "add_bias", "dynamo", "numeric"

    def run(self, gm, ctx):
        bias = add_input(gm, "bias", "test_bias", torch.zeros(3), ctx)
        assert add_input(gm, "bias", "test_bias", torch.zeros(3), ctx) is bias
        output = gm.graph.output_node()
        (results,) = output.args
        with gm.graph.inserting_before(output):
            output.args = (tuple(gm.graph.call_function(torch.add, (r, bias)) for r in results),)
        return PassResult(True)


@pytest.mark.parametrize(
    "inner", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)]
)
def test_an_added_input_is_supplied_anew_at_every_call_of_one_graph(inner, monkeypatch):
    bias = torch.ones(3)
    monkeypatch.setattr(pipeline, "DYNAMO_PASSES", (AddBias(),))
    monkeypatch.setitem(extra_inputs.SUPPLIERS, "test_bias", lambda args: bias)
    graphs = []

    def counted(gm, inputs):
        graphs.append(gm)
        return backend.compile_graph(gm, inputs, backend.CompileOptions(inner=inner))

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x * 2, backend=counted, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for rows in (4, 7):
            x = torch.randn(rows, 3)
            assert torch.equal(compiled(x), x * 2 + bias)
            bias = bias + 1.0
    assert len(graphs) == 1
    names = [node.name for node in graphs[0].graph.find_nodes(op="placeholder")]
    assert names[-1] == "l_x_", "Dynamo reads its own graph again, so it stays as it was"


def test_a_graph_without_added_inputs_is_called_directly():
    def compiled(x):
        return x

    assert extra_inputs.supplied(compiled, []) is compiled


def test_a_key_with_a_family_finds_who_makes_a_supplier_for_the_graph(monkeypatch):
    monkeypatch.setitem(extra_inputs.PER_GRAPH, "test_pool:", lambda extra: lambda args: (extra.key, args))
    extra = ExtraInput("pool", "test_pool:kda_scan", torch.zeros(1))
    assert extra_inputs.supplier_of(extra)(7) == ("test_pool:kda_scan", 7)
