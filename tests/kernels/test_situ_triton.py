"""SiTU in Triton, interpreted, against the float64 meaning."""

import pytest
import torch
from interpreted import check_op, check_samples, meaning_of, outcome_of
from k3compile.kernels.situ_triton import objection


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_samples_come_out_as_the_meaning_says(dtype):
    check_samples("situ", dtype)


def test_small_values_keep_their_digits():
    """Where (1 - t) / (1 + t) would cancel: each value against itself, not against the largest."""
    small = torch.logspace(-6, 0.6, 200) * torch.tensor([1.0, -1.0]).repeat(100)
    (got,), _ = outcome_of("situ", (small.view(10, 20), small.view(10, 20), 4.0, 25.0))
    (want,), _ = meaning_of("situ", (small.view(10, 20), small.view(10, 20), 4.0, 25.0))
    assert ((got.double() - want).abs() <= 2e-6 * want.abs()).all()


def test_large_values_are_capped_and_finite():
    extreme = torch.tensor([[-1e4, -200.0, -30.0, 30.0, 200.0, 1e4]])
    (got,), _ = check_op("situ", torch.float32, (extreme, extreme, 4.0, 25.0))
    assert got.abs().max() <= 100.0


def test_halves_of_one_projection_are_read_where_they_are():
    both = torch.full((5, 96), torch.nan)
    both[:, 16:48], both[:, 56:88] = torch.randn(5, 32), torch.randn(5, 32)
    check_op("situ", torch.float32, (both[:, 16:48], both[:, 56:88], 4.0, 25.0))


def test_what_does_not_fit_is_refused(monkeypatch):
    from k3compile.kernels import situ_triton

    x = torch.randn(3, 16)
    assert objection(x, x, 4.0, 25.0) == "cpu tensors"
    monkeypatch.setattr(situ_triton, "no_gpu", lambda *tensors: None)
    assert objection(x, x, 4.0, 25.0) is None
    assert "float64" in objection(x.double(), x, 4.0, 25.0)
    assert "16 bytes" in objection(torch.randn(3, 20)[:, 1:17], x, 4.0, 25.0)
