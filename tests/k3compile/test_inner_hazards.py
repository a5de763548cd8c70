"""What Inductor would compute wrongly is compiled by aot_eager, is right, and the report says so."""

import pytest
import torch
from hazard_programs import RIGHT, WRONG, all_rows_given_beside_the_written, arguments
from small_models import SMALL, small_model
from torch._inductor import config

from k3compile import inner, report
from k3compile.forward import compile_forward

pytestmark = [pytest.mark.usefixtures("own_reports", "test_op"), pytest.mark.inductor]


@pytest.fixture(scope="module", name="test_op")
def declared():
    from alias_fuzz import rev_into

    rev_into()


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
def test_no_kind_of_layer_of_the_model_has_a_hazard(monkeypatch):
    """The graphs as Inductor takes them from us, for every kind of layer."""
    checked = []
    real = inner.hazards
    monkeypatch.setattr(inner, "hazards", lambda graph: checked.append(real(graph)) or checked[-1])
    model = small_model(dtype=torch.float32)
    with config.patch(force_disable_caches=True):
        compile_forward(model, model.make_pools(3, 4, 4, 3))
    assert {made.inner for made in report.all()} == {"inductor"}
    assert len(checked) >= len({SMALL.kind(i) for i in range(SMALL.num_hidden_layers)})
    assert not any(checked)
