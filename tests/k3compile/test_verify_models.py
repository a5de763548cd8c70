"""Differential verification has nothing to say against our own passes on whole models."""

import pytest
import torch
from hf_models import kimi_linear, prompt
from small_models import SMALL, SMALL_LINEAR, small_model

from k3compile import adopt, report
from k3compile.forward import compile_forward
from k3compile.options import CompileOptions

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_reports")]


def comparisons(made):
    return [r.reason for r in made.remarks if r.reason.startswith("differential verification: computes")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [SMALL, SMALL_LINEAR], ids=["k3", "kimi-linear"])
def test_every_kind_of_layer_is_verified_without_a_false_alarm(sizes, dtype):
    model = small_model(sizes, dtype=dtype)
    options = CompileOptions(inner="aot_eager", verify="differential")
    compile_forward(model, model.make_pools(3, 4, 4, 3), options)
    assert len(report.all()) == len({sizes.kind(i) for i in range(sizes.num_hidden_layers)})
    for made in report.all():
        assert (made.status, made.notes) == ("compiled", ())
        assert len(comparisons(made)) >= 2, made.remarks


def test_an_adopted_kimi_linear_is_verified_without_a_false_alarm():
    model, ids = adopt(kimi_linear(layers=2)), prompt(9, 2)
    torch._dynamo.reset()
    options = {"inner": "aot_eager", "verify": "differential"}
    run = torch.compile(model, backend="k3", fullgraph=True, dynamic=False, options=options)
    with torch.no_grad():
        want, got = (f(input_ids=ids, use_cache=False).logits for f in (model, run))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert report.latest().status == "compiled"
    assert comparisons(report.latest())


@pytest.mark.inductor
def test_passes_that_run_inside_inductor_are_verified_on_real_inputs():
    def fn(x, n, pool, w):
        start = n[0].item()
        torch._check(start >= 0)
        torch._check(start <= x.shape[0])
        pool.add_(1)
        return torch.ops.k3.rms_norm(x.index_select(0, torch.arange(start)) * 2, w, 1e-5)

    x, pool, w = torch.rand(5, 3), torch.zeros(3), torch.ones(3)
    torch._dynamo.reset()
    with torch.no_grad():
        run = torch.compile(fn, backend="k3", fullgraph=True, options={"verify": "differential"})
        got = run(x, torch.tensor([2]), pool, w)
    torch.testing.assert_close(got, torch.ops.k3.rms_norm(x[:2] * 2, w, 1e-5))
    assert pool.tolist() == [1.0] * 3, "written once, by the call"
    assert report.latest().inner == "inductor"
    said = comparisons(report.latest())
    assert len(said) == 2
    assert all(s.endswith("on the inputs of this call") for s in said)
