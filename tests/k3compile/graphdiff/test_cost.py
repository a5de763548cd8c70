"""A graph's cost: views are free, writes cost what they write, and the peak is what lives at once."""

import pytest
import torch
from k3compile.passes.snapshot import snapshot
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import k3compile
from k3compile.graphdiff.cost import cost
from k3compile.options import pass_names


def cost_of(function, *inputs, tracing_mode="fake"):
    return cost(snapshot(make_fx(function, tracing_mode=tracing_mode)(*inputs)))


class Counter(TorchDispatchMode):
    """What eager really calls: operations that compute, and tensors with memory of their own."""

    def __init__(self):
        super().__init__()
        self.launches = self.allocations = 0
        self.known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        if result.untyped_storage().data_ptr() not in given:
            self.launches += "empty" not in str(func)
            self.allocations += 1
        self.keep = [*getattr(self, "keep", []), result]  # or a freed pointer would be met again
        return result


def chain(x, w):
    y = (x @ w).relu().view(-1)
    z = y[2:].reshape(-1, 1).transpose(0, 1)
    return torch.cat([z, z], 0).sum(1)


@pytest.mark.oracle
def test_launches_and_allocations_are_those_of_eager():
    inputs = torch.randn(4, 6), torch.randn(6, 5)
    with Counter() as counter:
        chain(*inputs)
    found = cost_of(chain, *inputs)
    assert (found.launches, found.allocations) == (counter.launches, counter.allocations)


def test_views_cost_nothing():
    found = cost_of(lambda x: x.view(-1)[3:].unsqueeze(0).expand(4, -1), torch.randn(4, 5))
    assert (found.launches, found.bytes_read, found.allocations) == (0, 0, 0)


def test_bytes_are_read_and_written_once_an_operation():
    found = cost_of(lambda x: x.sigmoid().exp(), torch.randn(10, 10))
    assert (found.bytes_read, found.bytes_written, found.allocated_bytes) == (800, 800, 800)


def scatter(x, i, y):
    out = x * 2
    return out.index_copy(0, i, y)


def scatter_of_what_is_read_later(x, i, y):
    out = x * 2
    return out.index_copy(0, i, y) + out


def test_a_scatter_reuses_its_target_where_nobody_reads_the_old_value():
    inputs = torch.randn(100, 4), torch.arange(3), torch.randn(3, 4)
    found = cost_of(scatter, *inputs)
    assert found.allocations == 1
    assert found.bytes_written == 1600 + 48
    copied = cost_of(scatter_of_what_is_read_later, *inputs)
    assert copied.allocations == 3
    assert copied.bytes_written == 1600 + 48 + 1600 + 1600


def assigned(x, y):
    out = x.new_empty(3, *x.shape)
    out[0] = x
    out[2] = y
    return out


def test_a_row_that_is_assigned_is_moved_once():
    x = torch.randn(4, 5)
    traced = make_fx(torch.func.functionalize(assigned), tracing_mode="fake")(x, x)
    traced.graph.eliminate_dead_code()  # views that functionalization makes of every state
    found = cost(snapshot(traced))
    assert (found.launches, found.allocations) == (2, 1)
    assert (found.bytes_read, found.bytes_written) == (2 * 80, 2 * 80)


def test_the_peak_is_what_lives_at_once_and_not_the_sum():
    def function(x):
        for _ in range(5):
            x = x + 1
        return x

    found = cost_of(function, torch.randn(25))
    assert found.allocated_bytes == 500
    assert found.at({})["peak_bytes"] == 200


def test_a_view_keeps_what_it_shows_alive():
    def function(x):
        y = x + 1
        view = y[:2]
        z = x + 2
        return z, view + 1

    assert cost_of(function, torch.randn(25)).at({})["peak_bytes"] == 208


def test_another_schema_is_refused():
    with pytest.raises(ValueError, match=r"schema is 'k3report/1'; a cost needs a k3graph/1 snapshot"):
        cost({"schema": "k3report/1"})


def test_a_graph_of_dynamo_costs_what_its_functional_form_does():
    def function(x, w, i, y):
        out = (x @ w).index_select(0, i)
        out.index_copy_(0, i, y)
        return torch.nn.functional.linear(out, w).relu()

    inputs = torch.randn(6, 4), torch.randn(4, 4), torch.arange(3), torch.randn(3, 4)
    stages = k3compile.capture(function, *inputs, options={"disable": pass_names()})[0]
    dynamo, aten = (cost(stages.stage(name).snapshot) for name in ("captured", "aten"))
    assert dynamo.launches == aten.launches == 5
    assert dynamo.flops == aten.flops
    assert dynamo.allocations == aten.allocations
