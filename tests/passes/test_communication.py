"""What talks to other ranks is known from the node, in torch's ops and in ours."""

import pytest
import torch
from compiled import Compiled
from k3compile.passes.communication import group_of, traffic_of
from latent_tails import EPS, make_args, reduce, tail, where_after
from pretended_group import pretended_group
from torch import fx

k3 = torch.ops.k3


@pytest.fixture
def eight():
    with pretended_group(8) as name:
        yield name


def calls(fn, *args):
    made = Compiled(fn, ())
    made(*args)
    return [n for n in made.graphs[-1].graph.nodes if n.op == "call_function"]


def test_a_collective_and_an_op_of_ours_name_their_group(eight):
    found = {str(n.target): group_of(n) for n in calls(lambda x: reduce(x, eight) + 1, torch.ones(3))}
    assert found == {
        "_c10d_functional.all_reduce.default": eight,
        "_c10d_functional.wait_tensor.default": "",
        "aten.add.Tensor": "",
    }
    (op,) = calls(lambda *args: k3.latent_tail(*args, EPS, eight), *make_args())
    assert group_of(op) == eight
    (op,) = calls(lambda *args: k3.latent_tail(*args, EPS, ""), *make_args())
    assert group_of(op) == ""


def test_a_graph_of_dynamo_leaves_the_overload_open(eight):
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in "abcdef"]
    assert group_of(graph.call_function(k3.latent_tail, (*given, EPS, eight))) == eight
    assert group_of(graph.call_function(k3.latent_tail, tuple(given), {"eps": EPS, "group": eight})) == eight
    assert group_of(graph.call_function(torch.relu, (given[0],))) == ""


def test_only_ops_of_ours_say_what_they_send(eight):
    nodes = calls(tail(where_after, group=eight), *make_args())
    assert [traffic_of(n) for n in nodes] == [()] * len(nodes)
    (op,) = calls(lambda *args: k3.latent_tail(*args, EPS, eight), *make_args(tokens=5, latent=24, width=16))
    (traffic,) = traffic_of(op)
    assert (traffic.collectives, traffic.sent) == (2, 4 * 5 * (24 + 16))
    (op,) = calls(lambda *args: k3.latent_tail(*args, EPS, ""), *make_args())
    assert traffic_of(op) == ()


def test_a_graph_without_sizes_sends_nobody_knows_what(eight):
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in "abcdef"]
    assert traffic_of(graph.call_function(k3.latent_tail.default, (*given, EPS, eight))) == ()
