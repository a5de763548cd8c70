"""Calls of C functions put together do what they do one by one, and say what one of them finds wrong."""

import ctypes
import subprocess

import pytest
import torch
from k3compile.kernels import OPS
from k3compile.kernels.native import build, unavailable, written_down

from k3compile import program
from k3compile.program import MOST, Together, run, shortened, words_of

pytestmark = pytest.mark.skipif(unavailable("calls") is not None, reason="no compiler")
SOURCE = r"""
#include <cstdint>
#include <cstring>
#include <stdexcept>
extern "C" {
void few(int64_t* out, int64_t a) { out[0] = out[0] * 10 + a; }
void seven(int64_t* out, int64_t a, int64_t b, int64_t c, int64_t d, int64_t e, int64_t f) {
  out[0] = out[0] * 10 + a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * f;
}
void most(int64_t* out, MANY) { out[0] = out[0] * 10 + a61; }
void nothing() {}
void throws(int64_t* out) { throw std::runtime_error("index 7 is out of bounds"); }
int64_t packed(const char* p) {
  int64_t* out;
  std::memcpy(&out, p, 8);
  int64_t status;
  std::memcpy(&status, p + 8, 8);
  out[0] = out[0] * 10 + 3;
  return status;
}
}
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    """Functions in C of every kind there is."""
    folder = tmp_path_factory.mktemp("functions")
    many = ", ".join(f"int64_t a{i}" for i in range(MOST - 1))
    (folder / "some.cpp").write_text(SOURCE.replace("MANY", many))
    library = str(folder / "some.so")
    compiler = [build.find_compiler(), "-shared", "-fPIC", "-o", library]
    subprocess.run([*compiler, str(folder / "some.cpp")], check=True)
    return ctypes.CDLL(library)


@pytest.fixture(autouse=True)
def generated(functions, monkeypatch):
    """Any Python function of this file stands for a kernel that Inductor made, of the same name in C."""

    def address(kernel):
        found = getattr(functions, kernel.__name__, None)
        return None if found is None else ctypes.cast(found, ctypes.c_void_p).value

    monkeypatch.setattr(program, "c_function", address)


def few(out, a):
    out[0] = out[0] * 10 + a


def seven(out, a, b, c, d, e, f):
    out[0] = out[0] * 10 + a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * f


def most(out, *a):
    out[0] = out[0] * 10 + a[-1]


def nothing():
    pass


def throws(out):
    raise AssertionError("called from Python")


def python_only(out):
    out[0] = out[0] * 10 + 9


def packed(functions, out, status=0):
    function = functions.packed
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int64
    return function, (out.data_ptr().to_bytes(8, "little") + status.to_bytes(8, "little"),)


def some(out, functions):
    return [
        (few, (out, 1)),
        (nothing, ()),
        (seven, (out, 1, 0, 0, 1, 0, 0)),
        (python_only, (out,)),
        packed(functions, out),
        (most, (out, *range(MOST - 1))),
        (few, (out, -4)),
    ]


def test_calls_of_functions_in_c_are_put_together_and_do_the_same(functions):
    one, other = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    short = shortened(some(one, functions))
    names = [len(f.calls) if isinstance(f, Together) else f.__name__ for f, _ in short]
    assert names == [3, "python_only", 3]
    run(short)
    run(some(other, functions))
    assert one.item() == other.item() != 0
    run(short)
    run(some(other, functions))
    assert one.item() == other.item()


def test_a_call_alone_stays_as_it_is(functions):
    out = torch.zeros(1, dtype=torch.int64)
    calls = [(few, (out, 1)), (python_only, (out,)), packed(functions, out)]
    assert shortened(calls) == calls
    assert shortened([]) == []


@pytest.mark.parametrize("args", [(0.5,), (True,), ("text",), (None,)])
def test_other_arguments_are_left_to_python(args):
    assert words_of(few, (torch.zeros(1), *args)) is None


def test_too_many_arguments_are_left_to_python(functions):
    out = torch.zeros(1, dtype=torch.int64)
    assert words_of(most, (out, *range(MOST))) is None
    assert words_of(most, (out, *range(MOST - 1)))[2] == MOST


def test_what_a_call_finds_wrong_is_raised_with_its_name(functions):
    out = torch.zeros(1, dtype=torch.int64)
    calls = [(few, (out, 1)), (throws, (out,)), (few, (out, 2))]
    with pytest.raises(RuntimeError, match="throws: index 7 is out of bounds"):
        run(shortened(calls))
    assert out.item() == 1
    with pytest.raises(RuntimeError, match="packed: it answered 5"):
        run(shortened([(few, (out, 1)), packed(functions, out, 5), (few, (out, 2))]))
    assert out.item() == 113


def test_strings_of_bytes_live_as_long_as_the_calls(functions):
    out = torch.zeros(1, dtype=torch.int64)
    short = shortened([packed(functions, out) for _ in range(15)])
    [bytes(16) for _ in range(1000)]
    run(short)
    assert out.item() == int("3" * 15)


def test_kernels_of_ours_together_are_the_kernels():
    op, calls = OPS["linear_bf16"], []
    args = [a for a in op.each_sample() if a[0].numel()]
    if reason := op.implementations["native"].objection(*args[0]):
        pytest.skip(reason)
    with written_down(calls, []):
        results = [torch.ops.k3.linear_bf16.native(*a) for a in args[:3]]
    wanted = [r.clone() for r in results]
    for r in results:
        r.fill_(7.0)
    (call,) = shortened(calls)
    run([call])
    assert all(map(torch.equal, results, wanted))


def test_without_a_compiler_calls_stay_as_they_are(functions, monkeypatch):
    monkeypatch.setattr(program, "unavailable", lambda name: "no compiler")
    calls = some(torch.zeros(1, dtype=torch.int64), functions)
    assert shortened(calls) == calls
