"""MXFP4 against compressed-tensors' own routines, code by code."""

import pytest
import torch
from k3compile.kernels import mxfp4


def grid():
    """A row of 32 columns for each scale byte, with every code once in each half of a byte."""
    codes = torch.arange(16, dtype=torch.uint8)
    packed = codes | (codes.flip(0) << 4)
    return packed.repeat(256, 1), torch.arange(256, dtype=torch.uint8).unsqueeze(1)


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_every_code_under_every_scale_is_what_compressed_tensors_reads(dtype):
    from compressed_tensors.compressors.mx_utils import decompress_mx_scale
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    packed, scale = grid()
    codes = unpack_fp4_from_uint8(packed, 256, 32, dtype=torch.float64)
    want = (codes * decompress_mx_scale(scale).double()).to(dtype)
    got = mxfp4.unpack(packed, scale, dtype)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(got[:255]), torch.signbit(want[:255]))


def test_golden_bytes():
    packed = torch.tensor([[0x21, 0xF8, 0x7A] + [0] * 13], dtype=torch.uint8)
    for scale, factor in ((127, 1.0), (126, 0.5)):
        got = mxfp4.unpack(packed, torch.tensor([[scale]], dtype=torch.uint8), torch.float32)[0, :6]
        assert got.tolist() == [x * factor for x in (0.5, 1.0, -0.0, -6.0, -1.0, 6.0)]
        assert torch.signbit(got).tolist() == [False, False, True, True, True, False]


@pytest.mark.parametrize("kind", [torch.uint8, torch.float8_e8m0fnu], ids=str)
def test_scale_bytes_about_one_mean_the_powers_about_one(kind):
    packed = torch.full((5, 16), 0x22, dtype=torch.uint8)  # every value 1.0
    scale = torch.arange(125, 130, dtype=torch.uint8).unsqueeze(1).view(kind)
    assert mxfp4.unpack(packed, scale, torch.float32)[:, 0].tolist() == [0.25, 0.5, 1.0, 2.0, 4.0]


def test_low_nibbles_are_even_columns_by_position():
    packed = torch.arange(16, dtype=torch.uint8).unsqueeze(0)  # codes only in low nibbles
    values = mxfp4.unpack(packed, torch.full((1, 1), 127, dtype=torch.uint8), torch.float32)[0]
    assert values[0::2].tolist() == list(mxfp4.E2M1)
    assert (values[1::2] == 0).all()


def test_a_scale_covers_the_32_columns_of_its_group():
    packed = torch.full((2, 48), 0x22, dtype=torch.uint8)
    scale = torch.tensor([[127, 128, 129], [126, 127, 125]], dtype=torch.uint8)
    got = mxfp4.unpack(packed, scale, torch.float32).view(2, 3, 32)
    assert got.amin(-1).tolist() == got.amax(-1).tolist() == [[1.0, 2.0, 4.0], [0.5, 1.0, 0.25]]


def test_packing_what_was_unpacked_gives_the_bytes_back():
    source = torch.Generator().manual_seed(0)
    packed = torch.randint(256, (3, 7, 64), dtype=torch.uint8, generator=source)
    packed[..., ::16] |= 0x07  # the largest code in each group, or its scale would not be the packer's
    scale = torch.randint(3, 250, (3, 7, 4), dtype=torch.uint8, generator=source)
    again = mxfp4.pack(mxfp4.unpack(packed, scale, torch.float64))
    assert torch.equal(again[0], packed)
    assert torch.equal(again[1], scale)


@pytest.mark.oracle
def test_rounding_is_compressed_tensors_rounding():
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from compressed_tensors.quantization.quant_args import FP4_E2M1_DATA

    x = torch.cat([torch.linspace(-7, 7, 20001, dtype=torch.float64), torch.arange(-28, 29) / 4.0])
    x = x[: len(x) // 32 * 32].view(-1, 32)
    want = pack_fp4_to_uint8(FP4_E2M1_DATA.cast_to_fp4(x.clone()))
    code = mxfp4.nearest_code(x)
    got = code[:, 0::2] | (code[:, 1::2] << 4)
    table = torch.tensor(mxfp4.E2M1)  # as values: the packers differ in the sign of a zero
    values = [table[torch.stack([b & 15, b >> 4]).int()] for b in (got, want)]
    assert torch.equal(*values)


def test_the_packers_scale_leaves_the_largest_value_in_the_top_binade():
    w = torch.randn(4, 128, dtype=torch.float64) * torch.logspace(-9, 9, 4, dtype=torch.float64)[:, None]
    packed, scale = mxfp4.pack(w)
    unit = w.view(4, 4, 32).abs().amax(-1) / torch.exp2(scale.double() - 127)
    assert (unit >= 4.0).all()
    assert (unit < 8.0).all()
    error = (mxfp4.unpack(packed, scale, torch.float64) - w).view(4, 4, 32).abs().amax(-1)
    assert (error <= 2.0 * torch.exp2(scale.double() - 127)).all()


def test_a_group_of_zeros_survives():
    packed, scale = mxfp4.pack(torch.zeros(1, 32))
    assert mxfp4.unpack(packed, scale, torch.float32).tolist() == [[0.0] * 32]


def test_odd_sizes_and_wrong_types_are_refused():
    byte = torch.zeros(2, 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="pad the matrix"):
        mxfp4.pack(torch.zeros(2, 33))
    with pytest.raises(ValueError, match="no code for infinity"):
        mxfp4.pack(torch.full((1, 32), torch.inf))
    for packed, scale in ((byte, byte), (byte[:, :15], byte[:, :1]), (byte, byte[:1, :1])):
        with pytest.raises(ValueError, match="one scale for 32 columns"):
            mxfp4.unpack(packed, scale, torch.float32)
    for packed, scale in ((byte.int(), byte[:, :1]), (byte, byte[:, :1].float())):
        with pytest.raises(ValueError, match="must be uint8"):
            mxfp4.unpack(packed, scale, torch.float32)


def test_strided_codes_are_read_by_their_strides():
    packed = torch.randint(256, (6, 32), dtype=torch.uint8)
    scale = torch.randint(120, 130, (6, 2), dtype=torch.uint8)
    got = mxfp4.unpack(packed[::2, 16:], scale[::2, 1:], torch.float32)
    assert torch.equal(got, mxfp4.unpack(packed, scale, torch.float32)[::2, 32:])
