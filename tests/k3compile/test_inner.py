"""Which graphs another compiler may have, and how ours are called."""

import operator

import pytest
import torch
from torch import fx

from k3compile import inner

ops = torch.ops.k3


def graph(target, *args, **kwargs) -> fx.GraphModule:
    """One call of ``target`` on the graph's input."""
    made = fx.Graph()
    x = made.placeholder("x")
    node = (
        made.call_method(target, (x, *args))
        if isinstance(target, str)
        else made.call_function(target, (x, *args))
    )
    node.kwargs = kwargs
    made.output(node)
    return fx.GraphModule({}, made)


@pytest.mark.parametrize(
    ("gm", "says"),
    [
        (graph(ops.l2_norm, 1.0), "it calls k3::l2_norm"),
        (graph(ops.l2_norm.default, 1.0), "it calls k3::l2_norm"),
        (graph(torch.ops._c10d_functional.all_reduce, "sum", "0"), "it calls the collective"),
        (graph("add_", 1), "it writes in place (add_)"),
        (graph(torch.relu_), "it writes in place (relu_)"),
        (graph(torch.nn.functional.relu, inplace=True), "it writes in place (relu)"),
        (graph(torch.sin, out=1), "it writes in place (sin)"),
        (graph(operator.setitem, 0, 1), "it writes in place (setitem)"),
        (graph(operator.iadd, 1), "it writes in place (iadd)"),
        (graph(torch.ops.aten.copy_.default, 1), "it writes in place (aten::copy_)"),
    ],
    ids=lambda v: "" if isinstance(v, fx.GraphModule) else v,
)
def test_a_graph_with_state_collectives_or_our_ops_stays_ours(gm, says):
    assert inner.island_objection(gm).startswith(says)


@pytest.mark.parametrize("target", [torch.sin, "sin", torch.nn.functional.relu, operator.neg, "__neg__"])
def test_a_pure_graph_may_go(target):
    assert inner.island_objection(graph(target)) is None


@pytest.mark.parametrize("by_node", [False, True])
def test_a_boxed_callable_frees_its_arguments(by_node):
    given = [torch.ones(2)]
    (gm,) = [graph(torch.sin)]
    call = inner.boxed(gm, by_node)
    assert call._boxed_call
    assert torch.equal(call(given), torch.ones(2).sin())
    assert given == []


def test_node_by_node_an_error_names_the_models_line():
    def model(x, i):
        return x.index_select(0, i)  # the line to be named

    torch._dynamo.reset()
    fn = torch.compile(model, backend="k3", options={"inner": "eager", "disable": ["contiguous_views"]})
    with torch.no_grad():
        fn(torch.ones(3), torch.tensor([1]))
        with pytest.raises(Exception, match="the line to be named"):
            fn(torch.ones(3), torch.tensor([7]))


def test_passes_are_not_run_on_training_graphs():
    ran = []
    passes = inner.AtenPasses(ran.append, "name")
    gm = graph(torch.sin)
    passes(gm.graph, is_inference=False)
    assert ran == []
    passes(gm.graph, is_inference=True)
    assert ran == [gm]
    assert passes.uuid() == "name"
    assert inner.AtenPasses(ran.append, None).uuid() is None
