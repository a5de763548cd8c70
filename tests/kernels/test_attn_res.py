"""Attention Residuals against the golden vector and the textbook spelling."""

import k3compile.kernels  # noqa: F401  registers the ops
import pytest
import torch

k3 = torch.ops.k3


def stacked(p, blocks, norm_w, proj_w, eps):
    """Everything in one tensor, as the description writes it."""
    v = torch.cat([blocks, p[None]])
    keys = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    weights = torch.softmax(keys @ (norm_w * proj_w), 0)
    return torch.einsum("nt,ntd->td", weights, v)


def test_golden_vector():
    blocks = torch.tensor([[[1.0, 2, 3, 4]], [[-1.0, 0, 1, 2]]], dtype=torch.float64)
    p = torch.tensor([[0.5, 0.5, -0.5, 1]], dtype=torch.float64)
    norm_w, proj_w = torch.tensor([[1, 0.5, 2, 1], [0.1, -0.2, 0.3, 0.4]], dtype=torch.float64)
    want = torch.tensor([[0.1390698, 0.9816764, 1.6668897, 2.7455864]], dtype=torch.float64)
    torch.testing.assert_close(k3.attn_res_mix(p, blocks, norm_w, proj_w, 1e-5), want, rtol=0, atol=1e-7)


@pytest.mark.parametrize("n", [0, 1, 2, 8])
def test_any_number_of_snapshots_is_one_softmax(n):
    p, norm_w, proj_w = torch.randn(6, 16), torch.randn(16), torch.randn(16)
    args = [a.double() for a in (p, torch.randn(n, 6, 16), norm_w, proj_w)]
    torch.testing.assert_close(k3.attn_res_mix(*args, 1e-5), stacked(*args, 1e-5))


def test_without_snapshots_the_running_sum_comes_back():
    p = torch.randn(5, 16)
    assert torch.equal(k3.attn_res_mix(p, p.new_empty(0, 5, 16), torch.randn(16), torch.randn(16), 1e-5), p)


def test_large_scores_do_not_overflow():
    p, blocks = torch.randn(3, 16), torch.randn(2, 3, 16)
    w = torch.full((16,), 100.0)
    got = k3.attn_res_mix(p, blocks, w, w, 1e-5)
    want = stacked(*(a.double() for a in (p, blocks, w, w)), 1e-5)
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3)


def test_the_mixture_takes_the_raw_rows():
    p, blocks = torch.ones(1, 4), torch.full((1, 1, 4), 100.0)
    got = k3.attn_res_mix(p, blocks, torch.zeros(4), torch.zeros(4), 1e-5)
    torch.testing.assert_close(got, torch.full((1, 4), 50.5))
