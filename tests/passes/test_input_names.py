"""Inputs keep the user's names through AOTAutograd, and sizes are called after them."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from k3compile.passes import input_names
from k3compile.passes.snapshot import digest, snapshot
from torch import fx
from torch._dynamo.decorators import mark_unbacked

from k3compile.graph_capture import capture
from k3compile.graphdiff.cost import cost


class Rows(NamedTuple):
    cu: torch.Tensor
    spans: torch.Tensor


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Linear(8, 8)

    def forward(self, p, rows):
        n = rows.spans[1].item()
        return self.proj(p) + rows.cu.sum(), p.new_ones(n) + 1


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("L['p']", "p"),
        ("L['step'].cu_other", "step.cu_other"),
        ("L['step'].cu_other.size()[0]", "step.cu_other.0"),
        ("L['self']._modules['ffn']._parameters['weight']", "self.ffn.weight"),
        ("L['args'][0]", "args[0]"),
        ("G['table']", "table"),
    ],
)
def test_a_source_is_told_without_the_spelling_of_dynamo(source, name):
    node = fx.Graph().placeholder("l_p_")
    node._dynamo_source = SimpleNamespace(name=source)
    assert input_names.plain(node) == name
    assert input_names.name_of(node) == name


def test_an_input_without_a_source_keeps_its_own_name_and_is_no_users_input():
    node = fx.Graph().placeholder("export_offset")
    assert input_names.plain(node) == "export_offset"
    assert input_names.name_of(node) is None


def test_the_aten_graph_knows_the_inputs_and_what_its_sizes_measure():
    mark_unbacked(p := torch.randn(5, 8), 0)
    rows = Rows(torch.zeros(3), torch.tensor([1, 2]))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        (timeline,) = capture(Model().forward, p, rows)
    named = [n.get("input") for n in timeline.stage("aten").snapshot["nodes"] if n["op"] == "placeholder"]
    assert any(name and name.endswith("proj.weight") for name in named), named
    found = cost(timeline.stage("aten").snapshot)
    assert "args[0].0" in found.names
    assert "args[1].spans[1]" in found.names
    assert found.at({"args[0].0": 6, "args[1].spans[1]": 2})["launches"] > 0


def test_names_of_inputs_are_no_part_of_the_digest():
    gm = fx.symbolic_trace(lambda x: x + 1)
    before = digest(snapshot(gm))
    next(iter(gm.graph.nodes)).meta[input_names.META] = "p"
    assert snapshot(gm)["nodes"][0]["input"] == "p"
    assert digest(snapshot(gm)) == before
