"""Triton's interpreter as the check needs it: in a reasonable time, and with the rounding of a GPU.

    a function called in a kernel   Triton wraps its whole language around it anew, over the wrappers of the
                                    call before: every call is slower than the last. Here once a function
    associative_scan                element by element in Python. Here in log2(n) steps, as a warp does it
    exp, exp2, fma                  off by two units in the last place, or rounded twice. Here rounded once

For float32. Where it is bfloat16 the interpreter cuts bits off, and the check leaves it out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.runtime.interpreter as interpreter


def improve() -> None:
    """Change the interpreter of this process, before it runs a kernel."""
    builder = interpreter.InterpreterBuilder
    builder.create_exp, builder.create_exp2 = rounded_once(np.exp), rounded_once(np.exp2)
    builder.create_fma = rounded_once(lambda x, y, z: x * y + z)
    interpreter.InterpretedFunction.__call__ = call_function
    interpreter.ScanOps.generic_scan = scan


def rounded_once(exact: Callable[..., np.ndarray]) -> Callable[..., Any]:
    """An operation of the interpreter's builder on floats, computed in float64."""

    def operation(self: Any, *operands: Any) -> Any:
        with np.errstate(all="ignore"):
            made = exact(*(o.data.astype(np.float64) for o in operands))
            return interpreter.TensorHandle(made.astype(operands[0].data.dtype), operands[0].dtype.scalar)

    return operation


@functools.cache
def wrap_language(fn: Callable[..., Any]) -> None:
    """Let what ``fn`` names compute with arrays: once, where Triton would do it at each call."""
    interpreter._patch_lang(fn)


def call_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A function called in a kernel."""
    wrap_language(self.fn)
    return self.rewrite()(*args, **kwargs)


def scan(self: Any, values: Any) -> list[Any]:
    """Every element takes in what stands 1, 2, 4, .. before it. Only called for scans that run forward."""
    arrays = [value.handle.data for value in values]
    length = arrays[0].shape[self.axis]
    places = np.arange(length).reshape([-1 if i == self.axis else 1 for i in range(arrays[0].ndim)])
    for distance in (1 << n for n in range((length - 1).bit_length())):
        before = [np.roll(array, distance, self.axis) for array in arrays]
        both = [self.to_tensor(array, v.dtype) for array, v in zip(before + arrays, [*values, *values])]
        made = self.combine_fn.fn(*both)
        made = made if isinstance(made, tuple) else (made,)
        arrays = [np.where(places < distance, old, new.handle.data) for old, new in zip(arrays, made)]
    return [self.to_tensor(array, value.dtype) for array, value in zip(arrays, values)]
