"""Random arguments for ops, in the shapes and layouts a layer hands over.

Values are drawn in float64 from a fixed seed and then rounded, so that a float64 run can be given what a
float32 or bfloat16 run was given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from .op import acc

_DRAW: ContextVar[int] = ContextVar("k3_draw", default=0)


@contextmanager
def drawn(number: int) -> Iterator[None]:
    """Inside, samples of the same shapes have other values, one set for each number; 0 are the usual ones."""
    token = _DRAW.set(number)
    try:
        yield
    finally:
        _DRAW.reset(token)


class Draw:
    """A seeded source of tensors of a model dtype and of its accumulation dtype."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        self.dtype, self.wide = dtype, acc(dtype)
        self.source = torch.Generator().manual_seed(seed + 1_000_003 * _DRAW.get())

    def exact(self, *shape: int) -> Tensor:
        """Normal values, float64."""
        return torch.randn(shape, generator=self.source, dtype=torch.float64)

    def normal(self, *shape: int) -> Tensor:
        """Normal values of the model dtype."""
        return self.exact(*shape).to(self.dtype)

    def normal_acc(self, *shape: int) -> Tensor:
        """Normal values of the accumulation dtype."""
        return self.exact(*shape).to(self.wide)

    def unit(self, *shape: int) -> Tensor:
        """Unit vectors along the last dimension, of the model dtype."""
        return F.normalize(self.exact(*shape), dim=-1).to(self.dtype)

    def fraction(self, *shape: int) -> Tensor:
        """Values in (0, 1), of the accumulation dtype."""
        return torch.sigmoid(self.exact(*shape)).to(self.wide)

    def choice(self, count: int, among: int) -> Tensor:
        """Different numbers out of 1 .. among - 1, int64: slots or pages, never the null one."""
        return torch.randperm(among - 1, generator=self.source)[:count] + 1

    def below(self, bound: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Integers in 0 .. bound - 1."""
        return torch.randint(bound, shape, generator=self.source, dtype=dtype)


def row_bounds(lengths: list[int]) -> Tensor:
    """cu [R+1] of rows of these lengths."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int64)


def packed_heads(parts: list[Tensor]) -> list[Tensor]:
    """[T, H, *] tensors as strided slices of one packed row, the way a fused projection is cut."""
    flat = torch.cat([part.flatten(1) for part in parts], 1)
    cut = flat.split([part.shape[1] * part.shape[2] for part in parts], 1)
    return [piece.view(part.shape) for piece, part in zip(cut, parts)]


def gapped(pool: Tensor) -> Tensor:
    """The same pool with unused elements between its slots."""
    wide = pool.new_zeros(pool.shape[0], 2, *pool.shape[1:])
    wide[:, 0] = pool
    return wide[:, 0]
