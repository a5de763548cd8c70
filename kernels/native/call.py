"""How Python calls a kernel: all arguments in one string of bytes, which costs a microsecond for twenty.

ctypes converts arguments one by one, and makes an array for each list of strides: for a layer of one token
that is more time than its arithmetic takes. cpu/arguments.h reads them back in the same order.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from .build import library

Call = Callable[..., int]
_written: dict[int, tuple[list, list]] = {}  # thread -> where its calls are written down, and what they read


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
        packed = pack(*args)
        if _written and (here := _written.get(threading.get_ident())):
            here[0].append((function, (packed,)))
        return function(packed)

    return call


@contextmanager
def written_down(calls: list[tuple[Callable[..., Any], tuple]], kept: list[Any]) -> Iterator[None]:
    """Inside, every call of this thread is added to ``calls``, as function and arguments. They read tensors,
    which whoever asks has to keep, and :func:`numbers`, which are added to ``kept``.
    """
    me = threading.get_ident()
    before = _written.get(me)
    _written[me] = calls, kept
    try:
        yield
    finally:
        _written.pop(me) if before is None else _written.update({me: before})


def numbers(values: Iterable[int]) -> array:
    """int64 side by side for a kernel; ``buffer_info()[0]`` is their address."""
    made = array("q", values)
    if _written and (here := _written.get(threading.get_ident())):
        here[1].append(made)
    return made


def address(t: Tensor | None) -> int:
    """Of its first element; 0, a null pointer, for None."""
    return 0 if t is None else t.data_ptr()


def longs(t: Tensor) -> Tensor:
    """The same numbers as int64 side by side, as a kernel reads them. Whoever calls keeps it alive."""
    return t if t.dtype is torch.int64 and t.is_contiguous() else t.long().contiguous()


def unwritten() -> None:
    """Say that a kernel is called past :func:`entry`: what is written down does not stand for this op."""
    if _written and (here := _written.get(threading.get_ident())):
        here[0].append((unwritten, ()))
