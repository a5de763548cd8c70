"""Absorbed queries and expanded means against scores and values of expanded latents."""

import pytest
import torch

k3 = torch.ops.k3
HEADS, NOPE, ROPE, VALUE, LATENT = 3, 8, 4, 6, 16


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-5)], ids=str)
def test_a_row_of_a_page_meets_an_absorbed_query_as_its_key_meets_the_query(dtype, bound):
    q = torch.randn(5, HEADS, NOPE + ROPE, dtype=dtype)
    kv_b = torch.randn(HEADS * (NOPE + VALUE), LATENT, dtype=dtype) / 4
    rows = torch.randn(9, LATENT + ROPE, dtype=dtype)
    absorbed = k3.mla_absorb(q, kv_b, NOPE)
    assert absorbed.shape == (HEADS, 5, LATENT + ROPE)
    for head in range(HEADS):
        keys = rows[:, :LATENT] @ kv_b.view(HEADS, -1, LATENT)[head, :NOPE].T
        want = q[:, head] @ torch.cat([keys, rows[:, LATENT:]], 1).T
        torch.testing.assert_close(absorbed[head] @ rows.T, want, rtol=bound, atol=bound)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-5)], ids=str)
def test_an_expanded_mean_is_the_mean_of_expanded_latents(dtype, bound):
    kv_b = torch.randn(HEADS * (NOPE + VALUE), LATENT, dtype=dtype) / 4
    latents, weights = torch.randn(9, LATENT, dtype=dtype), torch.rand(HEADS, 5, 9, dtype=dtype)
    got = k3.mla_expand(weights @ latents, kv_b, VALUE)
    values = (latents @ kv_b.T).view(9, HEADS, NOPE + VALUE)[..., NOPE:]
    want = torch.einsum("htc,chv->htv", weights, values)
    assert got.is_contiguous()
    torch.testing.assert_close(got, want, rtol=bound, atol=bound)


def test_bfloat16_is_summed_wide_a_query_is_not_rounded_and_a_mean_once():
    q = torch.randn(7, HEADS, NOPE + ROPE).bfloat16()
    kv_b = torch.randn(HEADS * (NOPE + VALUE), LATENT).bfloat16()
    exact = k3.mla_absorb(q.double(), kv_b.double(), NOPE)
    torch.testing.assert_close(k3.mla_absorb(q, kv_b, NOPE), exact.float(), rtol=1e-5, atol=1e-5)
    z = torch.randn(HEADS, 7, LATENT)
    got = k3.mla_expand(z, kv_b, VALUE)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(
        got.double(), k3.mla_expand(z.double(), kv_b.double(), VALUE), rtol=8e-3, atol=1e-3
    )
