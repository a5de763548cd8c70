"""Arguments in one string: what Python packs is what C++ reads, in order and with all its bits."""

import pytest
import torch
from k3compile.kernels.native import CannotBuild, address, build, entry, longs

SOURCE = """
#include "arguments.h"
extern "C" __attribute__((visibility("default"))) int64_t told(const char* packed) {
  k3::Arguments of{packed};
  const int64_t first = of;
  const double second = of;
  const float* third = of;
  double* fourth = of;
  const int64_t fifth = of;
  *fourth = third ? second + third[1] : second;
  return first - fifth;
}
"""


@pytest.fixture
def told(tmp_path, monkeypatch):
    """The entry of a library made of SOURCE."""
    for header in build.SOURCES.glob("*.h"):
        (tmp_path / header.name).write_text(header.read_text())
    (tmp_path / "told.cpp").write_text(SOURCE)
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setattr(build, "_LOADED", {})
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path)
    if reason := build.unavailable("told"):
        pytest.skip(reason)
    entry.cache_clear()
    yield entry("told", "told", "qdqqq")
    entry.cache_clear()


def test_every_kind_of_argument_arrives_as_it_was(told):
    numbers, out = torch.tensor([1.0, 2.5]), torch.zeros(1, dtype=torch.float64)
    assert told(2**62, 0.1, address(numbers), address(out), -(2**61)) == 2**62 + 2**61
    assert out.item() == 0.1 + 2.5
    assert told(-1, 1e-300, address(None), address(out), True) == -2
    assert out.item() == 1e-300


def test_a_wrong_number_of_arguments_is_an_error_and_no_call(told):
    with pytest.raises(Exception, match="pack expected 5 items"):
        told(1, 2.0)


def test_a_library_that_cannot_be_had_says_so(monkeypatch):
    monkeypatch.setattr(build, "_LOADED", {})
    monkeypatch.setattr(build, "compilers", list)
    entry.cache_clear()
    with pytest.raises(CannotBuild, match="no C\\+\\+ compiler"):
        entry("linear", "k3_linear_bf16", "9q")
    entry.cache_clear()


def test_indices_are_int64_side_by_side():
    own = torch.arange(6)
    assert longs(own) is own
    for other in (own.to(torch.int32), own[::2], own.view(2, 3).t()):
        got = longs(other)
        assert got.dtype == torch.int64
        assert got.is_contiguous()
        assert got.tolist() == other.tolist()
