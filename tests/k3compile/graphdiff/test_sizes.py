"""Sizes of a snapshot become numbers or expressions; widths follow dtypes."""

import pytest

from k3compile.graphdiff.sizes import bytes_of, entry_bytes, itemsize, numel, shape


def tensor(dims, dtype="float32", stride=None):
    return {"shape": dims, "dtype": dtype, "stride": stride or [1] * len(dims), "storage": 0}


@pytest.mark.parametrize(
    ("dtype", "width"),
    [
        ("float32", 4),
        ("bfloat16", 2),
        ("float64", 8),
        ("uint8", 1),
        ("int64", 8),
        ("bool", 1),
        ("float8_e4m3fn", 1),
        ("float4_e2m1fn_x2", 1),
        ("complex64", 8),
    ],
)
def test_the_width_of_an_element_follows_its_dtype(dtype, width):
    assert itemsize(dtype) == width


def test_symbols_stay_symbols_until_they_are_given_numbers():
    one = tensor(["s0", "2*s0 + 1", 4], "bfloat16")
    assert str(numel(one)) == "4*s0*(2*s0 + 1)"
    assert (
        bytes_of(one).subs({"s0": 3}) == 0
        or bytes_of(one).subs(dict.fromkeys(bytes_of(one).free_symbols, 3)) == 168
    )
    assert shape(one)[2] == 4


def test_the_same_symbol_is_one_symbol_everywhere():
    assert numel(tensor(["u1"])) == numel(tensor([1, "u1"]))


def test_an_expanded_dimension_is_stored_once():
    assert bytes_of(tensor([8, 5], stride=[0, 1])) == 20


def test_an_entry_is_what_one_index_of_the_first_dimension_holds():
    assert entry_bytes(tensor([100, 3, 7], "float32")) == 84
    assert entry_bytes(tensor(["u0"], "int64")) == 8
