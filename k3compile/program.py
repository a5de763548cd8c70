"""Recorded calls, those of functions in C put together: one call makes all that follow each other.

    call, call, op of torch, call, call, call   ->   run(call, call), op of torch, run(call, call, call)

From Python a call costs more than many a kernel takes for one row: ours convert a string of bytes, Inductor's
ask each argument for its address. Functions and addresses are known by then, and cpu/calls.cpp has a loop.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from torch import Tensor

from .kernels.native import entry, unavailable
from .torch_private import c_function

Call = tuple[Callable[..., Any], tuple]
Words = tuple[int, ...]  # function, whether it answers, how many arguments, those: numbers and addresses
MOST = 63  # arguments of a call in cpu/calls.cpp
MESSAGE = 1024  # bytes


def run(calls: Iterable[Call]) -> None:
    """Make the calls, one after the other."""
    for function, args in calls:
        function(*args)


def shortened(calls: Iterable[Call]) -> list[Call]:
    """Calls that do the same. Whoever asks keeps the tensors that the given ones name."""
    if unavailable("calls"):
        return list(calls)
    found: list[Call] = []
    together: list[tuple[Words, Call]] = []

    def close() -> None:
        if together:
            found.append(as_one(together))
            together.clear()

    for call in calls:
        words = words_of(*call)
        if words is None:
            close()
            found.append(call)
        else:
            together.append((words, call))
    close()
    return found


def as_one(together: list[tuple[Words, Call]]) -> Call:
    """One call for those; a single one stays as it is."""
    if len(together) == 1:
        return together[0][1]
    return Together([words for words, _ in together], [call for _, call in together]), ()


class Together:
    """Calls of C functions, made by one. Raises RuntimeError with what one of them finds wrong."""

    def __init__(self, words: list[Words], calls: list[Call]) -> None:
        self.calls = calls  # with the strings of bytes and the tensors that words point to
        self._words = array("q", chain.from_iterable(words))
        self._message = ctypes.create_string_buffer(MESSAGE)
        start, count = self._words.buffer_info()
        self._args = start, count, ctypes.addressof(self._message), MESSAGE
        self._run = entry("calls", "k3_calls", "4q")

    def __call__(self) -> None:
        if failed := self._run(*self._args):
            name = getattr(self.calls[failed - 1][0], "__name__", "a kernel")
            raise RuntimeError(f"{name}: {self._message.value.decode(errors='replace')}")


def words_of(function: Callable[..., Any], args: tuple) -> Words | None:
    """A call as numbers; None where it is no C function, or has other arguments than those go for."""
    answers = isinstance(function, ctypes._CFuncPtr)
    if answers:
        address, (packed,) = ctypes.cast(function, ctypes.c_void_p).value, args
        values = [ctypes.cast(ctypes.c_char_p(packed), ctypes.c_void_p).value]
    else:
        address = c_function(function)
        if not all(isinstance(a, Tensor) or type(a) is int for a in args):
            return None
        values = [a.data_ptr() if isinstance(a, Tensor) else a for a in args]
    return (address, int(answers), len(values), *values) if address and len(values) <= MOST else None
