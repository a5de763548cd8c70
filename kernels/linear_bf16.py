"""A product with a matrix that is kept in bfloat16, by activations that are not.

    y[t, o] = sum_i x[t, i] w[o, i]        w bfloat16, read as it is; sums in acc

Of a model with float32 activations and bfloat16 weights torch would widen a whole matrix at each use: five
times the bytes. T token rows, in and out columns.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from .op import acc, acc_of, op
from .samples import Draw


@op()
def linear_bf16(x: Tensor, w: Tensor) -> Tensor:
    """x [T, in], w [out, in] bfloat16 -> [T, out] of x's dtype; summed in acc with one rounding."""
    return F.linear(acc_of(x), w.to(acc(x.dtype))).to(x.dtype)


@linear_bf16.fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0])


@linear_bf16.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    draw = Draw(dtype)

    def matrix(outputs: int, inputs: int) -> Tensor:
        return (draw.exact(outputs, inputs) * inputs**-0.5).to(torch.bfloat16)

    for tokens in (0, 1, 3, 9, 70):
        yield draw.normal(tokens, 40), matrix(24, 40)
    yield draw.normal(5, 96)[:, 8:72], matrix(70, 64)
    yield draw.normal(1, 7), matrix(3, 7)
