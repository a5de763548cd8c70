"""What Inductor would compute wrongly is compiled by aot_eager, is right, and the report says so."""

import pytest
import reversing_op  # noqa: F401  (declares the op that programs call)
import torch
from hazard_programs import RIGHT, WRONG, all_rows_given_beside_the_written, arguments
from hf_models import kimi_linear, prompt
from ordinary_programs import ordinary
from small_models import SMALL, SMALL_LINEAR, small_model
from torch._inductor import config

from k3compile import adopt, inner, report
from k3compile.forward import compile_forward

pytestmark = [pytest.mark.usefixtures("own_reports"), pytest.mark.inductor]


def outcome(fn, compiled):
    args = arguments(fn)
    with torch.no_grad():
        results = compiled(*args)
    return [*(results if isinstance(results, tuple) else [results]), *args]


def agrees(fn, backend):
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=backend, fullgraph=True)
    return all(map(torch.equal, outcome(fn, fn), outcome(fn, compiled)))


@pytest.mark.parametrize("fn", WRONG, ids=lambda fn: fn.__name__)
def test_a_hazard_is_compiled_by_aot_eager_and_is_right(fn):
    assert agrees(fn, "k3")
    made = report.latest()
    assert made.inner == "aot_eager"
    (note,) = made.notes
    assert note.startswith("compiled with aot_eager: ")
    assert "may compute that wrongly" in note


def test_what_our_rewrite_would_make_a_hazard_is_kept_from_inductor_too():
    assert agrees(all_rows_given_beside_the_written, "k3")
    assert "reads a copy of what it writes" in report.latest().notes[0]


def test_a_graph_for_training_is_guarded_too():
    """Inductor saves for the backward what it has zeroed by then: the gradient would be zero."""

    def scattered_then_zeroed(x, y, w):
        z = torch.slice_scatter(x, y[:2], 0, 1, 3)
        x.zero_()
        return z * w

    def gradient(fn):
        x, w = torch.arange(16.0).view(4, 4), torch.full((4, 4), 2.0, requires_grad=True)
        fn(x, -x - 1, w).sum().backward()
        return w.grad

    torch._dynamo.reset()
    got = gradient(torch.compile(scattered_then_zeroed, backend="k3"))
    assert torch.equal(got, gradient(scattered_then_zeroed))
    made = report.latest()
    assert (made.inner, made.status) == ("aot_eager", "handed on")
    assert "may compute that wrongly" in made.notes[0]


@pytest.mark.slow
def test_inductor_alone_still_gets_them_wrong():
    wrong = [fn.__name__ for fn in WRONG if not agrees(fn, "inductor")]
    assert len(wrong) == len(WRONG), f"the guard can be narrowed: only {wrong} are wrong"


@pytest.mark.slow
@pytest.mark.parametrize("fn", RIGHT, ids=lambda fn: fn.__name__)
def test_what_inductor_computes_rightly_it_compiles(fn):
    assert agrees(fn, "k3")
    assert (report.latest().inner, report.latest().notes) == ("inductor", ())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two_layers", "adam", "batch_norm"])
def test_ordinary_models_are_compiled_by_inductor(name):
    one = ordinary()[name]
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(one.fn, backend="k3", fullgraph=True)(*one.args)
    assert (report.latest().inner, report.latest().notes) == ("inductor", ())


@pytest.fixture(name="checked")
def guard_watched(monkeypatch):
    """What the guard said of each graph as Inductor took it from us; no cache answers instead."""
    said = []
    real = inner.hazards
    monkeypatch.setattr(inner, "hazards", lambda graph: said.append(real(graph)) or said[-1])
    with config.patch(force_disable_caches=True):
        yield said


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [SMALL, SMALL_LINEAR], ids=["k3", "kimi-linear"])
def test_no_kind_of_layer_of_the_model_has_a_hazard(checked, sizes):
    model = small_model(sizes, dtype=torch.float32)
    compile_forward(model, model.make_pools(3, 4, 4, 3))
    assert {made.inner for made in report.all()} == {"inductor"}
    assert len(checked) >= len({sizes.kind(i) for i in range(sizes.num_hidden_layers)})
    assert not any(checked)


@pytest.mark.slow
def test_no_adopted_graph_of_transformers_has_a_hazard(checked):
    model = adopt(kimi_linear(layers=2))
    torch._dynamo.reset()
    run = torch.compile(model, backend="k3", fullgraph=True, dynamic=False)
    ids = prompt(5)
    with torch.no_grad():
        want, got = (f(input_ids=ids, use_cache=False).logits for f in (model, run))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert report.latest().inner == "inductor"
    assert checked
    assert not any(checked)
