"""Lesson 3: a local change is a value: what to find, what to put there, and when not to."""

import torch
from k3compile.passes import pipeline
from k3compile.passes.rewrite import Rewrite

from k3compile import backend, report

aten = torch.ops.aten


def two_scalings(x, a, b):
    return aten.mul.Tensor(aten.mul.Tensor(x, a), b)


def one_scaling(x, a, b):
    return aten.mul.Tensor(x, a * b)


def not_numbers(site):
    """Only host numbers can be multiplied while compiling."""
    return None if all(isinstance(site.argument(n), float) for n in "ab") else "a factor is a tensor"


FOLD = Rewrite("fold_scalings", two_scalings, one_scaling, not_numbers, keeps="numeric")
pipeline.ATEN_PASSES = (FOLD, *pipeline.ATEN_PASSES)  # order is read, not computed

with torch.no_grad():
    compiled = torch.compile(
        lambda x: x * 2.0 * 3.0,
        backend=lambda gm, inputs: backend.compile_graph(
            gm, inputs, backend.CompileOptions(inner="aot_eager")
        ),
    )
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 6.0))
print(report.latest().text())
assert report.latest().applied("fold_scalings") == 1
