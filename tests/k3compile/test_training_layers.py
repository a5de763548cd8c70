"""Gradients through whole layers: those of eager in float64, or an error that names what has none."""

import pytest
import torch
from hf_models import kimi_linear, prompt
from k3compile.kernels.op import OPS
from k3compile.runtime.model import DecoderLayer
from lanes import thinned
from small_models import SMALL, SMALL_LINEAR, Row, make_step, small_model
from torch.overrides import TorchFunctionMode

from k3compile import adopt, kernels, report
from k3compile.opened_ops import open_ops

pytestmark = pytest.mark.usefixtures("own_reports")
CONFIGS = {"k3": SMALL, "kimi-linear": SMALL_LINEAR}
ROWS = [Row([1, 2, 3, 4, 5], 1, 0, (1, 2)), Row([7], 2, 3, (3,))]
ops = kernels and torch.ops.k3


class Opened(TorchFunctionMode):
    """Eager, with the open form of each k3 op in its place: what autograd differentiates node by node."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        namespace, _, name = getattr(func, "_qualified_op_name", "").partition("::")
        if namespace == "k3" and OPS[name].open_form is not None:
            func = OPS[name].open_form
        return func(*args, **(kwargs or {}))


def compiled(fn):
    torch._dynamo.reset()
    return torch.compile(fn, backend="k3", fullgraph=True, dynamic=False, options={"inner": "aot_eager"})


def gradients(config, index, forward):
    """Of the squares of a layer's results, by its input and its weights; and the results."""
    model = small_model(config)
    layer, pools = model.layers[index], model.make_pools(4, 5, 4, 3)[index]
    weights = {n: w.requires_grad_() for n, w in layer.named_parameters() if w.is_floating_point()}
    random = torch.Generator().manual_seed(1)
    p, blocks = (
        torch.randn(*shape, 6, config.hidden_size, dtype=torch.float64, generator=random)
        for shape in ((), (1,))
    )
    pools = type(pools)(*(pool.clone() for pool in pools))
    y = forward(layer, p.requires_grad_(), blocks, pools, make_step(ROWS))
    found = torch.autograd.grad(y.square().sum(), [p, *weights.values()], allow_unused=True)
    return y.detach(), dict(zip(["p", *weights], found))


OPENED = pytest.param(True, id="open_ops", marks=pytest.mark.slow), pytest.param(False, id="as it comes")


@pytest.mark.parametrize("opened", OPENED)
@pytest.mark.parametrize("name", thinned(CONFIGS, 1))
def test_an_attention_layer_has_the_gradients_of_eager(name, opened):
    config = CONFIGS[name]
    (index,) = [i for i in (3,) if config.kind(i)[0] == "mla"]
    with Opened():
        y, want = gradients(config, index, DecoderLayer.forward)
    run = compiled(DecoderLayer.forward)
    if opened:
        with open_ops():
            got_y, got = gradients(config, index, run)
    else:
        got_y, got = gradients(config, index, run)
    assert report.latest().status == "handed on"
    torch.testing.assert_close(got_y, y, rtol=1e-9, atol=1e-9)
    assert [n for n, g in want.items() if g is None] == ["ffn.e_score_correction_bias"], "it only chooses"
    assert [n for n, g in got.items() if g is None] == ["ffn.e_score_correction_bias"]
    for n, g in want.items():
        if g is not None:
            assert g.any()
            torch.testing.assert_close(got[n], g, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("opened", OPENED)
@pytest.mark.parametrize("name", thinned(CONFIGS, 1))
def test_a_kda_layer_that_writes_its_state_says_that_it_has_none(name, opened):
    assert CONFIGS[name].kind(1)[0] == "kda"
    run = compiled(DecoderLayer.forward)
    with pytest.raises(Exception, match=r"no gradient goes through k3.kda_verify, k3.kda_prefill"):  # noqa: PT012
        if opened:
            with open_ops():
                gradients(CONFIGS[name], 1, run)
        else:
            gradients(CONFIGS[name], 1, run)


@pytest.mark.slow
def test_an_adopted_kimi_linear_of_transformers_has_the_gradients_of_its_own_eager():
    model = kimi_linear(layers=2).double()
    model.set_experts_implementation("batched_mm")  # traceable, and knows float64
    ids = prompt(5)

    def found(forward):
        logits = forward(input_ids=ids, use_cache=False).logits
        return torch.autograd.grad(logits.square().sum(), [*model.parameters()], allow_unused=True)

    want = found(model)
    got = found(compiled(adopt(model)))
    assert report.latest().status == "handed on"
    assert [g is None for g in got] == [g is None for g in want]
    for g, w in zip(got, want):
        if w is not None:
            torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-9)


def into_the_whole(buffer, x, w):
    buffer.copy_(ops.rms_norm(x, w, 1e-5))


def into_rows(buffer, x, w):
    buffer[1:3] = ops.rms_norm(x, w, 1e-5)[1:3]
    return x.detach().sum()


def written(fn):
    buffer = torch.zeros(4, 3, dtype=torch.float64)
    x = torch.arange(12.0, dtype=torch.float64).view(4, 3).requires_grad_()
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    fn(buffer, x, w)
    return torch.autograd.grad(buffer.square().sum(), [x, w])


@pytest.mark.parametrize("fn", [into_the_whole, into_rows])
def test_gradients_reach_an_input_that_is_written(fn):
    """No result wants a gradient there; what is left in the input does."""
    with Opened():
        want = written(fn)
    got = written(compiled(fn))
    assert report.latest().reason.startswith("an input is written with what requires a gradient")
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-9)


def test_without_gradients_a_written_input_is_no_training():
    run = compiled(into_rows)
    with torch.no_grad():
        run(torch.zeros(4, 3), torch.rand(4, 3, requires_grad=True) * 1, torch.ones(3))
    assert report.latest().status == "compiled"
