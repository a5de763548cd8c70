"""An RMSNorm is found in every spelling, with what it rounds, and nothing else is taken for one."""

import pytest
import torch
from k3compile.passes.rms_norm import rms_norm_at
from latent_tails import EPS, NORMS
from torch.nn import functional as F
from traced import result, traced


def found_in(fn, *args, **options):
    graph, prover = traced(fn, *args, **options)
    return rms_norm_at(result(graph), prover)


@pytest.mark.parametrize("symbolic", [True, False], ids=["symbolic", "static"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=lambda f: f.__name__)
def test_every_spelling_is_found(norm, dtype, symbolic):
    x, w = torch.randn(5, 24).to(dtype), torch.randn(24).to(dtype)
    found = found_in(norm, x, w, symbolic=symbolic)
    assert (found.x.op, found.weight.op) == ("placeholder", "placeholder")
    assert found.x is not found.weight
    assert found.eps == pytest.approx(EPS, rel=1e-6)
    before = norm.__name__ == "k3_norm" or (norm.__name__ == "hugging_face" and dtype == torch.bfloat16)
    assert found.rounding == ("before the gain" if before else "once")
    assert found.result is result(found.result.graph)


def test_a_gain_that_is_shifted_is_the_shifted_one():
    found = found_in(
        lambda x, w: F.rms_norm(x, (24,), None, EPS) * (1 + w), torch.randn(5, 24), torch.randn(24)
    )
    assert "add" in found.weight.name


def test_a_norm_without_a_gain_says_so():
    found = found_in(lambda x: F.rms_norm(x, (24,), None, EPS), torch.randn(5, 24), symbolic=False)
    assert found.weight is None


def test_any_number_of_dimensions():
    found = found_in(NORMS[0], torch.randn(2, 3, 24), torch.randn(24))
    assert found.x.op == "placeholder"


ALMOST = {
    "the mean of another tensor": lambda x, w: x * torch.rsqrt((x + 1).pow(2).mean(-1, True) + EPS) * w,
    "over another dimension": lambda x, w: x * torch.rsqrt(x.pow(2).mean(0, True) + EPS) * w,
    "without eps": lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, True)) * w,
    "a sum that is not divided": lambda x, w: x * torch.rsqrt(x.pow(2).sum(-1, True) + EPS) * w,
    "divided by another number": lambda x, w: x * torch.rsqrt(x.pow(2).sum(-1, True) / 7 + EPS) * w,
    "a third power": lambda x, w: x * torch.rsqrt(x.pow(3).mean(-1, True) + EPS) * w,
    "the root itself": lambda x, w: x * torch.sqrt(x.pow(2).mean(-1, True) + EPS) * w,
    "a layer norm": lambda x, w: F.layer_norm(x, (24,), w, None, EPS),
    "the rows' scales swapped": lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1) + EPS) * w,
    "a gain for each row": lambda x, w: F.rms_norm(x, (24,), None, EPS) * w.unsqueeze(1),
}


@pytest.mark.parametrize("other", ALMOST.values(), ids=ALMOST.keys())
def test_what_is_almost_a_norm_is_not_one(other):
    found = found_in(other, torch.randn(24, 24), torch.randn(24), symbolic=False)
    assert found is None or found.weight is None
