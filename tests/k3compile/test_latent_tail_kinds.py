"""Finalize and tail of the model's own mixture of experts are one op, in every kind of layer."""

from pathlib import Path

import pytest
import torch
from k3compile.runtime.config import K3Config
from k3compile.runtime.moe import Moe
from small_models import SMALL, small_model

from k3compile.entry import k3
from k3compile.kinds import compile_kinds
from k3compile.options import CompileOptions

pytestmark = pytest.mark.usefixtures("own_reports")
CONFIG = Path(__file__).parents[1] / "data" / "kimi-k3-config.json"


def moe_of(model):
    return next(layer.ffn for layer in model.layers if isinstance(layer.ffn, Moe))


def of_pass(report):
    """What was said of sites; a note says that there is none."""
    found = [r for record in report.records if record.name == "latent_tail" for r in record.remarks]
    return [r for r in found if r.kind != "note"]


@pytest.mark.slow  # tests/passes/test_latent_tail_model.py has the layer alone
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_every_kind_of_layer_with_experts_has_its_op(inner):
    options = CompileOptions(inner=inner, verify="static", require={"latent_tail": 1})
    for kind in compile_kinds(SMALL, options):
        remarks = of_pass(kind.report)
        assert [r.kind for r in remarks] == (["applied"] if "moe" in kind.name else []), kind.name


@pytest.mark.slow
def test_the_released_configuration_has_one_op_in_each_of_its_92_layers_with_experts():
    kinds = compile_kinds(K3Config.from_file(CONFIG), CompileOptions(inner="aot_eager", verify="static"))
    applied = {k.name: k.layers * k.report.applied("latent_tail") for k in kinds}
    assert sum(applied.values()) == 92
    assert applied["kda+dense+snapshot"] == 0
    for kind in kinds:
        for remark in of_pass(kind.report):
            assert remark.expected["launches"] == -6


@pytest.mark.slow
@pytest.mark.inductor
def test_under_inductor_the_op_is_opened_and_close():
    moe = moe_of(small_model(dtype=torch.float32))
    exact = moe_of(small_model())
    torch._dynamo.reset()
    compiled = torch.compile(moe, backend=k3, options={"require": {"latent_tail": 1}}, dynamic=True)
    for tokens in (5, 64):
        x = torch.randn(tokens, SMALL.hidden_size)
        with torch.no_grad():
            want = exact(x.double())
            error, plain = (compiled(x).double() - want).norm(), (moe(x).double() - want).norm()
        assert error <= 1e-5 * want.norm(), (error, plain)
