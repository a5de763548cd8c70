"""Every implementation of every op, by the registry, and its checks where it can run.

    for one in every_implementation(): one.exact(torch.float32)        Triton's in the interpreter's process

A new implementation is found by being registered, so that none can be forgotten.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from interpreted import interpreted
from k3compile.kernels import OPS
from k3compile.kernels.jit_triton import interpreting

from k3compile.gpu_check import exactness, poison
from k3compile.gpu_check.exactness import Verdict


class One(NamedTuple):
    op: str
    provider: str

    def exact(self, dtype: torch.dtype) -> Verdict:
        """The error rule over all draws."""
        return self._run("exact", dtype)

    def poisoned(self, dtype: torch.dtype, calls: int) -> list[Verdict]:
        """Calls of the op with NaN in all that is not theirs."""
        return self._run("poisoned", dtype, calls)

    def _run(self, what: str, *args):
        if self.provider.startswith("triton"):
            return interpreted("every_kernel", f"interpreted_{what}", *self, *args)[0]
        return globals()[what](*self, *args)


def every_implementation() -> list[One]:
    """In the order of the registry."""
    return [One(name, provider) for name, op in OPS.items() for provider in op.implementations]


def exact(op: str, provider: str, dtype: torch.dtype) -> Verdict:
    return exactness.check(OPS[op], provider, dtype)


def poisoned(op: str, provider: str, dtype: torch.dtype, calls: int) -> list[Verdict]:
    some = sorted(poison.calls(OPS[op], dtype), key=poison.numbers)[:calls]
    return [poison.check(OPS[op], provider, args, dtype) for args in some]


def interpreted_exact(*args) -> Verdict:
    with interpreting():
        return exact(*args)


def interpreted_poisoned(*args) -> list[Verdict]:
    with interpreting():
        return poisoned(*args)
