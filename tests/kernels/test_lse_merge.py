"""Merged parts of a softmax against the softmax over everything, in float64."""

import pytest
import torch

k3 = torch.ops.k3


def parts_of(scores, values, cuts):
    """o [N, a, b, L] and lse [N, a, b] of the pieces of scores [a, b, c] and values [c, L]."""
    found = []
    for s, v in zip(scores.tensor_split(cuts, 2), values.tensor_split(cuts)):
        if s.shape[2]:
            found.append((s.softmax(2) @ v, s.logsumexp(2)))
        else:
            found.append((s.new_zeros(*s.shape[:2], v.shape[1]), s.new_full(s.shape[:2], -torch.inf)))
    return map(torch.stack, zip(*found))


@pytest.mark.parametrize("scale", [1.0, 300.0, 1e4])
@pytest.mark.parametrize("cuts", [(), (4,), (0, 3, 3, 11), (1, 2, 12)], ids=str)
def test_the_merge_is_the_softmax_over_all_parts(cuts, scale):
    scores = torch.randn(3, 5, 12, dtype=torch.float64) * scale
    values = torch.randn(12, 7, dtype=torch.float64)
    o, lse = parts_of(scores, values, cuts)
    torch.testing.assert_close(k3.lse_merge(o, lse), scores.softmax(2) @ values, rtol=1e-12, atol=1e-12)


def test_float32_and_bfloat16_parts_are_summed_in_float32():
    scores, values = torch.randn(3, 5, 12, dtype=torch.float64), torch.randn(12, 7, dtype=torch.float64)
    o, lse = parts_of(scores, values, (5, 6))
    want = scores.softmax(2) @ values
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        got = k3.lse_merge(o.to(dtype), lse.float())
        assert got.dtype == torch.float32
        assert (got - want).abs().max() < bound


def test_nothing_anywhere_is_zero_and_not_a_nan():
    o, lse = torch.zeros(4, 2, 3, 5), torch.full((4, 2, 3), -torch.inf)
    lse[:, 1], o[2, 1] = torch.tensor([-torch.inf, -torch.inf, 2.0, -torch.inf])[:, None], 7.0
    got = k3.lse_merge(o, lse)
    assert (got[0] == 0).all()
    assert (got[1] == 7).all()


def test_sums_far_apart_neither_overflow_nor_vanish():
    o = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1, 1)
    assert k3.lse_merge(o, torch.tensor([800.0, -800.0, 100.0]).view(3, 1, 1)).item() == 1.0
    assert k3.lse_merge(o, torch.full((3, 1, 1), -5000.0)).item() == 2.0


@pytest.mark.parametrize("where", ["o", "lse", "both"])
def test_a_nan_is_not_hidden(where):
    o, lse = torch.ones(3, 1, 2, 4), torch.zeros(3, 1, 2)
    if where != "lse":
        o[1, 0, 0] = torch.nan
    if where != "o":
        lse[1, 0, 0] = torch.nan
    got = k3.lse_merge(o, lse)
    assert got[0, 0].isnan().all()
    assert (got[0, 1] == 1).all()
