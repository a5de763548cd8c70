"""A product with a bfloat16 matrix in C++ on a CPU; cpu/linear.cpp has the picture."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .linear_bf16 import linear_bf16
from .native import Call, entry, left_to_meaning, threads, unavailable


def objection(x, w) -> str | None:
    """Why these arguments are not for here, or None; the first answer compiles the kernel."""
    if x.device.type != "cpu":
        return f"{x.device.type} tensors"
    if x.dtype != torch.float32 or w.dtype != torch.bfloat16:
        return f"activations are {x.dtype} and the matrix is {w.dtype}, not float32 and bfloat16"
    return unavailable("linear")


def function(isa: str | None) -> Call:
    """The kernel of the library for ``isa``."""
    return entry("linear", "k3_linear_bf16", "9q", isa)


@functools.cache
def kernel_here() -> Call | None:
    """The kernel for this CPU; None, with a warning, where there is none."""
    if left_to_meaning("linear"):
        return None
    return function(None)


@linear_bf16.impl("native", objection=objection, note="C++ that was compiled here", by_address=True)
def linear_native(x: Tensor, w: Tensor) -> Tensor:
    """As the meaning; code that was compiled elsewhere and cached may find no kernel here, and warns once."""
    kernel = kernel_here()
    return linear_bf16.meaning(x, w) if kernel is None else run(x, w, kernel)


def run(x: Tensor, w: Tensor, kernel: Call) -> Tensor:
    """The same with a kernel of :func:`function`."""
    rows, columns = x.shape
    outputs = w.shape[0]
    (x_stride, x_column), (w_stride, w_column) = x.stride(), w.stride()
    if x_column != 1:
        x, x_stride = x.contiguous(), columns
    if w_column != 1:
        w, w_stride = w.contiguous(), columns
    y = x.new_empty(rows, outputs)
    kernel(x.data_ptr(), w.data_ptr(), y.data_ptr(), rows, outputs, columns, x_stride, w_stride, threads())
    return y
