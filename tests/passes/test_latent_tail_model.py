"""Finalize and tail of the model's own mixture of experts are one op; bits stay."""

import pytest
import torch
from compiled import Compiled
from k3compile.runtime.moe import Moe
from small_models import SMALL, SMALL_LINEAR, small_model


def moe_of(model):
    return next(layer.ffn for layer in model.layers if isinstance(layer.ffn, Moe))


@pytest.mark.parametrize("decompose", [False, True], ids=["plain", "decomposed"])
def test_one_op_a_mixture_and_the_bits_of_the_plain_layer(decompose):
    moe = moe_of(small_model())
    compiled = Compiled(Moe.forward, decompose=decompose, unbacked="L['x']:0")
    for tokens in (5, 1, 0, 64):
        x = torch.randn(tokens, SMALL.hidden_size, dtype=torch.float64)
        with torch.no_grad():
            expected = moe(x)
        assert torch.equal(compiled(moe, x), expected), tokens
    assert len(compiled.graphs) == 1
    assert compiled.targets().count("k3.latent_tail.default") == 1
    assert not any(t.startswith("_c10d") for t in compiled.targets())
    (remark,) = compiled.remarks(name="latent_tail")
    assert remark.source.split("/")[-1].startswith("moe.py")
    assert remark.expected["launches"] == -6
    assert remark.expected["all_reduces"] == -2


def test_a_mixture_without_a_latent_has_no_site_and_says_why():
    compiled = Compiled(Moe.forward, unbacked="L['x']:0")
    compiled(moe_of(small_model(SMALL_LINEAR)), torch.randn(5, SMALL_LINEAR.hidden_size).double())
    (remark,) = compiled.remarks(name="latent_tail")
    assert remark.kind == "missed"
    assert remark.reason.startswith("no norm follows the weighted sum: aten.add")
