"""Sample inputs are reproducible, rounded from one float64 draw, and laid out as they say."""

import torch
from k3compile.kernels import OPS
from k3compile.kernels.samples import Draw, drawn, gapped, packed_heads, row_bounds


def test_every_dtype_rounds_the_same_values():
    wide, narrow = Draw(torch.float64).normal(3, 4), Draw(torch.bfloat16).normal(3, 4)
    assert torch.equal(wide.bfloat16(), narrow)
    assert Draw(torch.bfloat16).fraction(2).dtype == torch.float32


def test_samples_are_the_same_each_time():
    for declared in OPS.values():
        for one, two in zip(declared.each_sample(), declared.each_sample(), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, two) if isinstance(a, torch.Tensor))


def test_another_draw_has_other_values_of_the_same_shapes():
    usual = list(OPS["rms_norm"].each_sample())
    with drawn(3):
        others, again = list(OPS["rms_norm"].each_sample()), list(OPS["rms_norm"].each_sample())
    assert [[a.shape for a in args[:2]] for args in usual] == [[a.shape for a in args[:2]] for args in others]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(others, again))
    assert not torch.equal(usual[1][0], others[1][0])


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
