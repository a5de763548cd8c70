"""The improved interpreter does what Triton's own does, rounded once, and no call is slower than the last."""

import subprocess
import sys

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow  # three processes that import torch and Triton

PROGRAM = """
import numpy as np
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter

from k3compile.gpu_check.interpreter_triton import improve

@triton.jit
def both(a, x, b, y):
    return a * b, x * b + y

@triton.jit
def twice(x):
    return x + x

@triton.jit
def kernel(x_ptr, y_ptr, REVERSE: tl.constexpr):
    at = tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8)[None, :]
    x = tl.load(x_ptr + at)
    for i in range(40):
        x = twice(x) * 0.5
    decays, sums = tl.associative_scan((tl.exp(x), x), 1, both, REVERSE)
    tl.store(y_ptr + at, tl.fma(decays, tl.exp2(x), sums))

def result(reverse):
    x, y = torch.linspace(-1.0, 0.7, 32), torch.empty(32)
    kernel[(1,)](x, y, reverse)
    return y

def wide(reverse):
    x = np.linspace(-1.0, 0.7, 32).astype(np.float32).reshape(4, 8).astype(np.float64)
    a, s = np.exp(x), x.copy()
    for i in (range(6, -1, -1) if reverse else range(1, 8)):
        j = i + 1 if reverse else i - 1
        s[:, i] += s[:, j] * a[:, i]
        a[:, i] *= a[:, j]
    return torch.from_numpy((a * np.exp2(x) + s).reshape(-1))
"""


def interpreted(program, tmp_path):
    """What a program prints, its kernels interpreted."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM + program)
    command = ["env", "TRITON_INTERPRET=1", sys.executable, str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


def test_scans_and_functions_give_what_they_are_in_float64(tmp_path):
    program = "improve()\nfor r in (False, True): print(float((result(r) / wide(r) - 1).abs().max()))"
    for error in interpreted(program, tmp_path):
        assert float(error) < 2e-6


def test_exp_exp2_and_fma_are_rounded_once(tmp_path):
    program = """
improve()
builder, t = interpreter.InterpreterBuilder(), lambda x: interpreter.TensorHandle(x, tl.float32)
draw = np.random.default_rng(0).standard_normal
x, y, z = (draw(100_000).astype(np.float32) for _ in range(3))
for got, exact in (
    (builder.create_exp(t(x)), np.exp(x.astype(np.float64))),
    (builder.create_exp2(t(x)), np.exp2(x.astype(np.float64))),
    (builder.create_fma(t(x), t(y), t(z)), x.astype(np.float64) * y + z),
):
    assert got.dtype == tl.float32
    print((got.data == exact.astype(np.float32)).all())
"""
    assert interpreted(program, tmp_path) == ["True"] * 3


def test_the_language_is_wrapped_once_a_function(tmp_path):
    program = """
improve()
made, wrap = [], interpreter._patch_lang
interpreter._patch_lang = lambda fn: made.append(fn.__name__) or wrap(fn)
result(False)
result(False)
print(*made)
"""
    assert sorted(interpreted(program, tmp_path)) == ["kernel", "kernel", "twice"]
