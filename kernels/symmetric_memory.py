"""Sums over the GPUs of one node in one kernel: every rank reads the others' buffers, which it has mapped.

A rank writes its part into its own buffer; the kernel waits for all ranks before it reads and again before it
returns, so the buffer may be written anew at once.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor


@functools.lru_cache(maxsize=64)
def shared_buffer(group: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """This rank's buffer [numel]; every rank of ``group`` has to ask for it, in the same order.

    Raises what torch does where the GPUs cannot map each other's memory.
    """
    made = symm_mem.empty(numel, dtype=dtype, device=device)
    symm_mem.rendezvous(made, group)
    return made


def sum_of_buffers(part: Tensor, group: str) -> Tensor:
    """The sum over ranks of what stands at the start of their buffers, a new tensor shaped as ``part``."""
    return torch.ops.symm_mem.one_shot_all_reduce(part, "sum", group)
