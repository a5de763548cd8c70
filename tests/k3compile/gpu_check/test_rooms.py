"""Arguments laid out anew keep values, strides and what they share; what is beside them is NaN."""

import pytest
import torch
from k3compile.kernels.samples import packed_heads

from k3compile.gpu_check.rooms import GUARD, aligned, bits, moved_in


def test_values_strides_and_sharing_stay():
    packed = packed_heads([torch.randn(5, 2, n) for n in (3, 4)])
    given = [*packed, torch.randn(4, 6).t(), torch.arange(3), 1e-5, torch.empty(0, 4)]
    made, rooms = moved_in(given)
    for a, b in zip(given, made):
        if isinstance(a, torch.Tensor):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()
        else:
            assert a == b
    assert made[0].untyped_storage().data_ptr() == made[1].untyped_storage().data_ptr()
    assert len(rooms) == 4
    made[0].zero_()
    assert given[0].any(), "the caller's are not changed"


def test_wide_makes_floats_double_and_leaves_integers():
    made, _ = moved_in([torch.randn(3).bfloat16(), torch.arange(3, dtype=torch.int32)], wide=True)
    assert [m.dtype for m in made] == [torch.float64, torch.int32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_everything_beside_the_arguments_is_nan_and_a_write_there_is_counted(dtype):
    wide = torch.randn(3, 8).to(dtype)
    (x,), (room,) = moved_in([wide[:, :5]])
    assert int(torch.isnan(room.memory).sum()) == 2 * GUARD + 9
    x.add_(1.0)
    assert room.disturbed() == 0, "its own may change"
    room.memory[GUARD + 6] = 1.0
    room.memory[-1] = 0.0
    assert room.disturbed() == 2


def test_bits_tell_nan_from_nan():
    a, b = (torch.tensor([n], dtype=torch.int32).view(torch.float32) for n in (0x7FC00000, 0x7FC00001))
    assert torch.isnan(a).all()
    assert torch.isnan(b).all()
    assert not torch.equal(bits(a), bits(b))
    assert torch.equal(bits(a), bits(a.clone()))


def test_rows_are_aligned_where_they_are_not():
    odd, fine = torch.randn(4, 3, 10).bfloat16(), torch.randn(2, 8).bfloat16()
    codes = torch.zeros(2, 3, dtype=torch.uint8)
    made = aligned([odd, fine, torch.randn(5), 3, codes])
    assert torch.equal(made[0], odd)
    assert made[0].stride() == (48, 16, 1)
    assert made[1] is fine
    assert made[4] is codes
    shifted = torch.randn(40)[1:33].view(4, 8)[:, :4]
    assert aligned([shifted])[0].stride() == (4, 1), "its rows are whole vectors apart, and begin in one"
