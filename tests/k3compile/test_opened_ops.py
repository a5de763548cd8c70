"""Opened ops compute the same, can be differentiated, and are opened only where that was asked for."""

import pytest
import torch
from k3compile.kernels.op import OPS

from k3compile import open_ops, report
from k3compile.opened_ops import open_all

ops = torch.ops.k3
pytestmark = pytest.mark.usefixtures("own_reports")


def layer(x, w, gate, bias):
    y = ops.l2_norm(ops.rms_norm(x, w, 1e-5), 0.5)
    weights, ids = ops.route(y, gate, bias, 2, 1.0, True)
    return y, weights, ids


ARGS = torch.randn(5, 8), torch.randn(8), torch.randn(6, 8), torch.randn(6)


def compiled(fn, **options):
    torch._dynamo.reset()
    return torch.compile(fn, backend="k3", options={"inner": "aot_eager", **options}, fullgraph=True)


def test_inside_open_ops_no_op_is_left_and_every_bit_is_the_same():
    with torch.no_grad(), open_ops():
        results = compiled(layer)(*ARGS)
    assert all(torch.equal(a, b) for a, b in zip(results, layer(*ARGS)))
    made = report.latest()
    assert made.notes == ("3 k3 ops opened before tracing",)
    assert not [op for op in made.choices if op.startswith("k3.")]


def test_outside_they_stay():
    with torch.no_grad():
        with open_ops():
            pass
        compiled(layer)(*ARGS)
    assert len([op for op in report.latest().choices if op.startswith("k3.")]) == 3


def test_plain_opens_ops_and_runs_no_optimisation():
    with torch.no_grad():
        results = compiled(layer, features="plain")(*ARGS)
    assert all(torch.equal(a, b) for a, b in zip(results, layer(*ARGS)))
    assert report.latest().notes == ("3 k3 ops opened before tracing",)


def test_an_op_without_an_open_form_is_named():
    closed = next(op for op in OPS.values() if op.open_form is None)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(closed.overload, (x,)))
    assert open_all(torch.fx.GraphModule({}, graph)) == (0, [closed.name])


def test_both_spellings_of_an_op_are_opened():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    one = graph.call_function(ops.l2_norm, (x, 1.0))
    graph.output(graph.call_function(ops.l2_norm.default, (one, 1.0)))
    gm = torch.fx.GraphModule({}, graph)
    assert open_all(gm) == (2, [])
    assert torch.equal(gm(ARGS[0]), ops.l2_norm(ops.l2_norm(ARGS[0], 1.0), 1.0))
