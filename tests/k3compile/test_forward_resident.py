"""A model of bfloat16 matrices that computes in float32 reads them as they are, as exactly as before."""

import dataclasses
from typing import NamedTuple

import pytest
import torch
from k3compile.kernels.native import build
from k3compile.runtime.model import Model
from small_models import SMALL, SMALL_LINEAR, Row, make_step, small_model
from torch._inductor.utils import fresh_cache

from k3compile.forward import CompiledForward, compile_forward
from k3compile.options import CompileOptions
from k3compile.report import Report

pytestmark = pytest.mark.usefixtures("own_reports")
STATIC = CompileOptions(inner="aot_eager", verify="static")
ONE_KIND = dataclasses.replace(SMALL_LINEAR, num_hidden_layers=1, kda_layers=())


def kept_in_bfloat16(config) -> tuple[Model, Model]:
    """A model with float32 activations and bfloat16 matrices; the same numbers in a float64 model."""
    model = small_model(config, torch.float32, resident=torch.bfloat16)
    exact = Model(config, torch.float64)
    for (name, given), (_, parameter) in zip(model.named_parameters(), exact.named_parameters(), strict=True):
        parameter.copy_(given), name
    return model, exact


def prompt(count: int):
    return make_step([Row([(7 * i) % 90 for i in range(count)], 1, 0, list(range(1, 40)))])


class Compiled(NamedTuple):
    """A compiled model with the logits of a prompt: its own, eager, and of the float64 model."""

    model: Model
    forward: CompiledForward
    got: torch.Tensor
    eager: torch.Tensor
    want: torch.Tensor

    @property
    def reports(self) -> list[Report]:
        """Of the layers, and of the head at the end."""
        return [*self.forward.reports, *self.forward.head.reports]


def compiled_and_eager(config, options: CompileOptions, count: int = 100) -> Compiled:
    model, exact = kept_in_bfloat16(config)
    forward = compile_forward(model, model.make_pools(4, 40, 4), options)
    step = prompt(count)
    with torch.no_grad():
        got = forward.logits(forward(step)[0])
        eager = model.logits(model(step, model.make_pools(4, 40, 4))[0])
        want = exact.logits(exact(step, exact.make_pools(4, 40, 4))[0])
    return Compiled(model, forward, got, eager, want)


@pytest.fixture(scope="module")
def linear(tmp_path_factory):
    """Kimi Linear, compiled once for this file, with its graphs checked."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("reports")
        patch.setattr("k3compile.torch_private.cache_folder", lambda: folder)
        return compiled_and_eager(SMALL_LINEAR, STATIC)


def error(got, want) -> float:
    return ((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt()).item()


def check(compiled: Compiled):
    _, _, got, eager, want = compiled
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)  # eager is off by most of it
    assert error(got, want) <= 1.1 * error(eager, want)
    *layers, head = compiled.reports
    assert head.applied("read_bf16") == 1
    for report in layers:
        assert report.applied("read_bf16") >= 5, "every product of a layer"
        assert not report.missed("read_bf16")


def test_every_product_of_every_layer_reads_its_matrix_as_it_is(linear):
    check(linear)


@pytest.mark.slow
def test_every_product_of_every_layer_of_k3_reads_its_matrix_as_it_is():
    check(compiled_and_eager(SMALL, STATIC))


@pytest.mark.slow
def test_each_rewrite_keeps_the_numbers_of_the_graph_before_it():
    options = CompileOptions(inner="aot_eager", verify={"read_bf16": "differential"})
    check(compiled_and_eager(SMALL, options))


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("config", [SMALL, SMALL_LINEAR], ids=["k3", "kimi-linear"])
def test_under_inductor_too(config):
    with fresh_cache():  # the other model's head is the same graph, and reports are kept by test
        check(compiled_and_eager(config, CompileOptions()))


@pytest.mark.parametrize(
    "config", [ONE_KIND, pytest.param(SMALL_LINEAR, marks=pytest.mark.slow)], ids=["thin", "kimi-linear"]
)
def test_the_plain_point_knows_nothing_of_it(config):
    compiled = compiled_and_eager(config, CompileOptions(features="plain", inner="aot_eager"), 5)
    assert not any(report.applied("read_bf16") for report in compiled.reports)


def test_a_head_in_the_activations_dtype_is_not_compiled():
    model = small_model(SMALL_LINEAR, torch.float32)
    forward = CompiledForward(model, model.make_pools(4, 40, 4), CompileOptions(inner="aot_eager"))
    hidden = torch.randn(2, 3, SMALL_LINEAR.hidden_size)
    assert forward.head is None
    assert torch.equal(forward.logits(hidden), model.logits(hidden))


def test_hidden_states_of_any_shape_have_logits(linear):
    model, forward, *_ = linear
    for shape in ((1,), (2, 3), (0,)):
        hidden = torch.randn(*shape, SMALL_LINEAR.hidden_size)
        torch.testing.assert_close(forward.logits(hidden), model.logits(hidden), rtol=1e-5, atol=1e-5)
    with torch.inference_mode():
        hidden = torch.randn(4, SMALL_LINEAR.hidden_size)
        assert forward.logits(hidden).shape == (4, SMALL_LINEAR.vocab_size)
    assert len(forward.head.reports) == 1


def test_a_report_names_what_computes_the_products(linear):
    here = build.unavailable("linear") is None
    said = "computed by native, C++ that was compiled here" if here else "computed by its meaning"
    for report in linear.reports:
        assert report.choices["k3.linear_bf16"] == said
