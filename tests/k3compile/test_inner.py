"""How the inner compilers are called."""

import pytest
import torch
from torch import fx

from k3compile import inner


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
