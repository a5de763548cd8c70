"""An opened op computes what the op computed, in as many symbols, and adds no guard."""

import pytest
import torch
from k3compile.kernels.op import OPS
from k3compile.passes.graph import fake_mode_of
from k3compile.passes.lower import op_of
from k3compile.passes.opening import CannotOpen, open_node
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

ops = torch.ops.k3


def graph_of(fn, *args):
    """``fn`` traced with a symbol for the rows of its first argument."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    rows = StatelessSymbolicContext([DimDynamic.DYNAMIC] + [DimDynamic.STATIC] * (args[0].dim() - 1))
    fakes = [mode.from_tensor(args[0], symbolic_context=rows)]
    fakes += [mode.from_tensor(a, static_shapes=True) for a in args[1:]]
    with mode:
        return make_fx(fn)(*fakes)


def opened(gm, name, table=None):
    (node,) = [n for n in gm.graph.nodes if (op := op_of(n)) and op.name == name]
    open_node(gm, node, OPS[name].open_form, fake_mode_of(gm.graph), table or {})
    gm.graph.lint()
    gm.recompile()
    return gm


def names(gm):
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("table", [{}, "inductor"])
def test_an_opened_norm_has_its_bits_and_is_gone(table):
    table = dict(select_decomp_table()) if table else {}
    x, w = torch.randn(7, 16), torch.randn(16)
    gm = opened(graph_of(lambda x, w: ops.rms_norm(x * 2, w, 1e-5), x, w), "rms_norm", table)
    assert "k3.rms_norm.default" not in names(gm)
    assert torch.equal(gm(x, w), ops.rms_norm(x * 2, w, 1e-5))
    longer = torch.randn(31, 16)
    assert torch.equal(gm(longer, w), ops.rms_norm(longer * 2, w, 1e-5))


def test_every_result_of_a_tuple_finds_its_readers():
    x, gate, bias = torch.randn(5, 8), torch.randn(6, 8), torch.randn(6)

    def fn(x, gate, bias):
        weights, ids = ops.route(x, gate, bias, 2, 1.5, True)
        return ids, weights + 1

    gm = opened(graph_of(fn, x, gate, bias), "route")
    ids, weights = gm(x, gate, bias)
    expected = ops.route(x, gate, bias, 2, 1.5, True)
    assert torch.equal(ids, expected[1])
    assert torch.equal(weights, expected[0] + 1)


def test_opening_adds_no_guard_and_keeps_the_users_line():
    x, w = torch.randn(7, 16), torch.randn(16)
    gm = graph_of(lambda x, w: ops.rms_norm(x, w, 1e-5), x, w)
    (node,) = [n for n in gm.graph.nodes if op_of(n)]
    node.meta["stack_trace"] = 'File "model.py", line 3, in forward'
    env = fake_mode_of(gm.graph).shape_env
    before = len(env.guards)
    opened(gm, "rms_norm", dict(select_decomp_table()))
    assert len(env.guards) == before
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    assert all("model.py" in n.meta["stack_trace"] for n in calls)
    assert all("val" in n.meta for n in calls)


def refused(form, x=None):
    """What opening says when the meaning of rms_norm is ``form``; the graph must not change."""
    x = torch.randn(7, 16) if x is None else x
    gm = graph_of(lambda x, w: ops.rms_norm(x, w, 1e-5), x, torch.randn(16))
    (node,) = [n for n in gm.graph.nodes if op_of(n)]
    before = str(gm.graph)
    with pytest.raises(CannotOpen) as error:
        open_node(gm, node, form, fake_mode_of(gm.graph), {})
    assert str(gm.graph) == before
    return str(error.value)


def test_a_meaning_that_needs_a_guard_is_refused():
    assert "cannot be traced" in refused(lambda x, w, eps: x * 2 if x.shape[0] > 3 else x * 3)


def test_a_meaning_that_looks_at_data_is_refused():
    assert "cannot be traced" in refused(lambda x, w, eps: x * x[0, 0].item() if x.sum() > 0 else x)


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (lambda x, w, eps: (x * w).double(), "torch.float64"),
        (lambda x, w, eps: (x * w)[:, :-1], "it declares"),
        (lambda x, w, eps: (x * w).t().contiguous().t(), "stride"),
        (lambda x, w, eps: (x, w), "returns 2 values"),
    ],
)
def test_a_meaning_that_returns_something_else_is_refused(form, says):
    assert says in refused(form)


def test_sizes_nobody_knows_are_no_obstacle():
    """Every op that lowering opens is opened for data-dependent sizes, as the layers have them."""

    def fn(n, x, w, proj):
        rows, blocks = n[0].item(), n[1].item()
        torch._check(rows >= 0)
        torch._check(blocks >= 0)
        p, bank = x.new_zeros(rows, 16), x.new_zeros(blocks, rows, 16)
        return ops.attn_res_mix(p, bank, w, proj, 1e-5), ops.rms_norm(p, w, 1e-5), ops.l2_norm(p, 0.5)

    w = torch.randn(16)
    gm = graph_of(fn, torch.tensor([3, 2]), torch.randn(1), w, w)
    for name in ("attn_res_mix", "rms_norm", "l2_norm"):
        opened(gm, name, dict(select_decomp_table()))
    assert not [n for n in names(gm) if n.startswith("k3.")]
    assert gm(torch.tensor([4, 0]), torch.zeros(1), w, w)[0].shape == (4, 16)
