"""Small jobs for a pool of ranks, which imports them by name."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

LEFT = []


def summed(value):
    tensor = torch.tensor([value * 10.0 ** dist.get_rank()])
    dist.all_reduce(tensor)
    LEFT.append(value)
    return tensor.item(), list(LEFT)


def fails_on_rank_1():
    if dist.get_rank() == 1:
        raise ValueError("this rank does not want to")
    dist.barrier()


def ends_on_rank_0():
    if dist.get_rank() == 0:
        os._exit(7)
    dist.barrier()


def stands_still():
    time.sleep(3600)
