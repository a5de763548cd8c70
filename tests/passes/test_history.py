"""Snapshots in a row say which node is which."""

import torch
from k3compile.passes.history import Recorder
from torch import fx


def test_kept_nodes_are_followed_and_replaced_ones_are_told():
    gm = fx.symbolic_trace(lambda x: torch.relu(torch.sin(x)))
    recorder = Recorder("dynamo")
    before = recorder(gm)
    sin = next(n for n in gm.graph.nodes if n.target is torch.sin)
    with gm.graph.inserting_before(sin):
        new = gm.graph.call_function(torch.cos, sin.args)
    sin.replace_all_uses_with(new)
    gm.graph.erase_node(sin)
    after = recorder(gm)
    assert after["previous"] == before["moment"] != after["moment"]
    assert [n.get("was") for n in after["nodes"]] == [0, None, 2, 3]
    assert after["nodes"][1]["replaces"] == [1]
    assert not gm._replace_hooks


def test_a_graph_put_back_from_a_copy_claims_nothing():
    gm = fx.symbolic_trace(lambda x: torch.sin(x))
    recorder = Recorder("dynamo")
    recorder(gm)
    copy = fx.Graph()
    copy.output(copy.graph_copy(gm.graph, {}))
    gm.graph = copy
    assert not [n for n in recorder(gm)["nodes"] if "was" in n]
