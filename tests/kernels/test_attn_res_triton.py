"""The Triton mixture over depth, interpreted, against the float64 meaning."""

import pytest
import torch
from interpreted import check_op, check_samples
from k3compile.kernels import OPS
from k3compile.kernels.attn_res_triton import add_objection, objection

MIXES = ("attn_res_mix", "mix_rms_norm", "add_mix_rms_norm")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MIXES)
def test_samples_come_out_as_the_meaning_says(name, dtype):
    check_samples(name, dtype)


def test_blocks_that_are_not_banked_yet_are_not_read():
    bank = torch.full((4, 9, 24), torch.nan)
    bank[:2, 3:8] = torch.randn(2, 5, 24)
    gains = torch.randn(24), torch.randn(24)
    check_op("attn_res_mix", torch.float32, (torch.randn(5, 24), bank[:2, 3:8], *gains, 1e-5))


@pytest.mark.parametrize("place", [0, 3, 4])
def test_one_row_may_outweigh_the_others_wherever_it_stands(place):
    gain = torch.ones(32)
    rows = torch.randn(5, 6, 32)
    rows[place] = 30.0 + torch.rand(6, 32)  # its score is 32 and those of the others about 0
    args = (rows[4], rows[:4], gain, 40.0 * gain, 1e-5)
    (mixed,), _ = check_op("attn_res_mix", torch.float32, args)
    torch.testing.assert_close(mixed, rows[place])


def test_the_sum_is_rounded_before_it_is_scored():
    p, a, *rest = list(OPS["add_mix_rms_norm"].each_sample(torch.bfloat16))[4]
    (s, _), _ = check_op("add_mix_rms_norm", torch.bfloat16, (p, a, *rest))
    assert torch.equal(s, p + a)


def test_what_does_not_fit_is_refused(monkeypatch):
    from k3compile.kernels import attn_res_triton

    p, blocks, w = torch.randn(3, 16), torch.randn(2, 3, 16), torch.randn(16)
    assert objection(p, blocks, w, w, 1e-5) == "cpu tensors"
    monkeypatch.setattr(attn_res_triton, "no_gpu", lambda *tensors: None)
    assert objection(p, blocks, w, w, 1e-5) is None
    assert "float64" in objection(p.double(), blocks, w, w, 1e-5)
    assert "2 apart" in objection(p, blocks, w, torch.randn(16, 2)[:, 0], 1e-5)
    assert "blocks has elements" in objection(p, torch.randn(2, 16, 3).mT, w, w, 1e-5)
    assert "adds torch.bfloat16" in add_objection(p, p.bfloat16(), blocks, w, w, 1e-5)
