"""Collectives as values: each gives a new tensor and is two nodes in a graph, the call and its wait.

All ranks of a group must make the same calls in the same order with the same shapes. n ranks in a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

ops = torch.ops._c10d_functional


def all_reduce(x: Tensor, group: str) -> Tensor:
    """The sum of every rank's ``x``."""
    return ops.wait_tensor(ops.all_reduce(x, "sum", group))


def all_gather(x: Tensor, ranks: int, group: str) -> Tensor:
    """Every rank's ``x`` [a, ...] one after the other, [n * a, ...], rank 0's first."""
    return ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), ranks, group))


def reduce_scatter(x: Tensor, ranks: int, group: str) -> Tensor:
    """Of the sum of every rank's ``x`` [n * a, ...] the part [a, ...] at this rank's place."""
    return ops.wait_tensor(ops.reduce_scatter_tensor(x.contiguous(), "sum", ranks, group))


def all_to_all(x: Tensor, ranks: int, group: str) -> Tensor:
    """x [n, ...]: row r goes to rank r. -> [n, ...]: row r came from rank r."""
    split = [1] * ranks
    return ops.wait_tensor(ops.all_to_all_single(x.contiguous(), split, split, group))
