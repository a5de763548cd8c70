"""Sample inputs are reproducible, rounded from one float64 draw, and laid out as they say."""

import torch
from k3compile.kernels import OPS
from k3compile.kernels.samples import Draw, gapped, packed_heads, row_bounds


def test_every_dtype_rounds_the_same_values():
    wide, narrow = Draw(torch.float64).normal(3, 4), Draw(torch.bfloat16).normal(3, 4)
    assert torch.equal(wide.bfloat16(), narrow)
    assert Draw(torch.bfloat16).fraction(2).dtype == torch.float32


def test_samples_are_the_same_each_time():
    for declared in OPS.values():
        for one, two in zip(declared.each_sample(), declared.each_sample(), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, two) if isinstance(a, torch.Tensor))


def test_choices_differ_and_leave_out_the_null_one():
    chosen = Draw(torch.float32).choice(5, 6).tolist()
    assert sorted(chosen) == [1, 2, 3, 4, 5]


def test_layouts_keep_values():
    parts = [torch.randn(5, 2, n) for n in (3, 4)]
    for part, cut in zip(parts, packed_heads(parts)):
        assert torch.equal(part, cut)
        assert cut.stride() == (14, part.shape[2], 1)
    pool = torch.randn(4, 3, 2)
    assert torch.equal(gapped(pool), pool)
    assert not gapped(pool).is_contiguous()
    assert row_bounds([2, 0, 3]).tolist() == [0, 2, 2, 5]
