"""The tail on a CPU: the meaning's numbers in fewer calls, and the meaning itself where there are holes."""

import pytest
import torch
from k3compile.kernels.latent_tail import latent_tail
from k3compile.kernels.latent_tail_cpu import latent_tail_cpu, objection
from latent_tails import EPS, make_args


def arguments(dtype, tokens=5):
    return (*make_args(dtype, tokens, top_k=3), EPS, "")


@pytest.mark.parametrize("tokens", [0, 1, 2, 33])
@pytest.mark.parametrize("resident", [torch.float32, torch.bfloat16], ids=str)
def test_it_agrees_with_the_meaning(tokens, resident):
    rows, w, idx, norm_w, up_w, *rest = arguments(torch.float32, tokens)
    args = (rows, w, idx, norm_w, up_w.to(resident), *rest)
    torch.testing.assert_close(latent_tail_cpu(*args), latent_tail.meaning(*args), rtol=1e-5, atol=1e-5)


def test_holes_are_left_to_the_meaning():
    rows, w, idx, *rest = arguments(torch.float32)
    idx[0, 0], rows[0], w[0, 0] = -1, torch.nan, torch.nan
    idx[idx == 0] = 1
    got = latent_tail_cpu(rows, w, idx, *rest)
    assert torch.equal(got, latent_tail.meaning(rows, w, idx, *rest))
    assert torch.isfinite(got).all()


def test_the_shared_part_is_not_written():
    args = arguments(torch.float32)
    before = args[5].clone()
    got = latent_tail_cpu(*args)
    assert torch.equal(args[5], before)
    assert got.data_ptr() != args[5].data_ptr()


def test_a_row_does_not_depend_on_the_others_beyond_rounding():
    rows, w, idx, norm_w, up_w, shared, *rest = arguments(torch.float32, tokens=33)
    whole = latent_tail_cpu(rows, w, idx, norm_w, up_w, shared, *rest)
    alone = latent_tail_cpu(rows, w[7:8], idx[7:8], norm_w, up_w, shared[7:8], *rest)
    torch.testing.assert_close(whole[7:8], alone, rtol=1e-5, atol=1e-5)


def test_other_dtypes_are_computed_by_the_meaning():
    assert objection(*arguments(torch.float32)) is None
    assert "not float32" in objection(*arguments(torch.float64)), "float64 is compared bit for bit"
    assert "not float32" in objection(*arguments(torch.bfloat16))
    assert objection(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments(torch.float32)))
