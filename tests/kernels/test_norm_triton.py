"""The Triton norms, interpreted, against the float64 meaning."""

import pytest
import torch
from interpreted import check_op, check_samples
from k3compile.kernels import OPS
from k3compile.kernels.norm_triton import LONGEST

NORMS = ("rms_norm", "add_rms_norm", "l2_norm", "gated_rms_norm")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_samples_come_out_as_the_meaning_says(name, dtype):
    check_samples(name, dtype)


def test_nothing_past_a_row_is_read():
    whole = torch.full((5, 64), torch.nan)
    whole[:, 8:40] = torch.randn(5, 32)
    check_op("rms_norm", torch.float32, (whole[:, 8:40], torch.randn(32), 1e-5))
    check_op("add_rms_norm", torch.float32, (whole[:, 8:40], whole[:, 8:40], torch.randn(32), 1e-5))
    heads = whole[:, 8:32].view(5, 2, 12)
    check_op("l2_norm", torch.float32, (heads, 0.5))
    check_op("gated_rms_norm", torch.float32, (heads, heads, torch.randn(12), 1e-5))


def test_the_sum_that_goes_on_has_one_rounding_and_is_what_is_normed():
    x, r, w = torch.randn(9, 96).bfloat16(), torch.randn(9, 96).bfloat16(), torch.randn(96).bfloat16()
    (s, y), _ = check_op("add_rms_norm", torch.bfloat16, (x, r, w, 1e-5))
    assert torch.equal(s, x + r)
    assert torch.equal(y, OPS["rms_norm"](s, w, 1e-5)), "the norm is rounded before the gain"


def objection(name, *args):
    return OPS[name].implementations["triton"].objection(*args)


def test_a_cpu_is_refused():
    assert objection("rms_norm", torch.randn(2, 8), torch.randn(8), 1e-5) == "cpu tensors"


def test_what_does_not_fit_is_refused(monkeypatch):
    from k3compile.kernels import norm_triton

    monkeypatch.setattr(norm_triton, "no_gpu", lambda *tensors: None)
    x, w = torch.randn(2, 64), torch.randn(64)
    assert objection("rms_norm", x, w, 1e-5) is None
    assert "float64 where kernels take bfloat16 or float32" in objection("rms_norm", x.double(), w, 1e-5)
    assert "2 apart" in objection("rms_norm", torch.randn(64, 2).t(), w, 1e-5)
    assert "multiple of 16 bytes" in objection("rms_norm", torch.randn(2, 66)[:, 1:65], w, 1e-5)
    assert "adds torch.bfloat16" in objection("add_rms_norm", x, x.bfloat16(), w, 1e-5)
    assert "at most" in objection("rms_norm", torch.randn(1, 2 * LONGEST), w, 1e-5)
