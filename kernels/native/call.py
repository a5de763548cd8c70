"""How Python calls a kernel: all arguments in one string of bytes, which costs a microsecond for twenty.

ctypes converts arguments one by one, and makes an array for each list of strides: for a layer of one token
that is more time than its arithmetic takes. cpu/arguments.h reads them back in the same order.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from struct import Struct

import torch
from torch import Tensor

from .build import library

Call = Callable[..., int]


@functools.cache
def entry(name: str, symbol: str, layout: str, isa: str | None = None) -> Call:
    """``symbol`` of the library ``name`` for ``isa`` (default: this CPU's best), called with the arguments
    of ``layout``: q an integer or the address of a tensor, d a float, as in struct. Its result is an integer.

    Raises CannotBuild, ValueError for an unknown isa.
    """
    function = getattr(library(name, isa), symbol)
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int64
    pack = Struct(layout).pack

    def call(*args: float) -> int:
        return function(pack(*args))

    return call


def address(t: Tensor | None) -> int:
    """Of its first element; 0, a null pointer, for None."""
    return 0 if t is None else t.data_ptr()


def longs(t: Tensor) -> Tensor:
    """The same numbers as int64 side by side, as a kernel reads them. Whoever calls keeps it alive."""
    return t if t.dtype is torch.int64 and t.is_contiguous() else t.long().contiguous()
