"""Make Triton's interpreter round as a GPU does: bfloat16 is a pattern of bits to it, cut off and added.

Imported after triton and before a kernel runs, in a process with TRITON_INTERPRET=1. Casts between floats
round to the nearest even, dots take their operands at their value (a scaled one took bfloat16 for float16).
Arithmetic on bfloat16 itself is refused, as a kernel that does it rounds where its meaning does not; products
with powers of two are let through. A scan adds in a tree, as the threads of a warp do: sums of neighbours
then have errors of their own, which cancelled where NumPy went from one to the next.
"""

import functools

import ml_dtypes
import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter

VALUES = {
    tl.bfloat16: ml_dtypes.bfloat16,
    tl.float8e4nv: ml_dtypes.float8_e4m3fn,
    tl.float8e5: ml_dtypes.float8_e5m2,
    tl.float16: np.float16,
    tl.float32: np.float32,
    tl.float64: np.float64,
}
BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)
EVEN = {None, getattr(interpreter._ir.ROUNDING_MODE, "RTNE", None)}
Builder = interpreter.InterpreterBuilder
convert_bits, multiply, combine = interpreter._convert_float, Builder.create_dot, Builder.binary_op
value_of_scaled = getattr(interpreter, "_mxfp_value_handle_to_float32", None)  # Triton 3.8 and later


def convert(data, source, target, rounding):
    """One float type to another, to the nearest even."""
    if source not in VALUES or target not in VALUES or rounding not in EVEN:
        return convert_bits(data, source, target, rounding)
    with np.errstate(all="ignore"):
        rounded = np.ascontiguousarray(data).view(VALUES[source]).astype(VALUES[target])
    return rounded.view(f"uint{target.primitive_bitwidth}").reshape(data.shape)


def widened(handle):
    """A bfloat16 operand as the float32 it is."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    values = np.ascontiguousarray(handle.data).view(ml_dtypes.bfloat16).astype(np.float32)
    return interpreter.TensorHandle(values, tl.float32)


def dot(self, a, b, d, precision, imprecise):
    return multiply(self, widened(a), widened(b), d, precision, imprecise)


def scaled_operand(handle):
    return widened(handle).data if handle.dtype.scalar == tl.bfloat16 else value_of_scaled(handle)


def powers_of_two(handle):
    """Whether all its elements are."""
    return np.all(np.frexp(np.abs(widened(handle).data))[0] == 0.5)


def binary(self, left, right, op):
    if op is np.multiply and left.dtype.scalar == right.dtype.scalar == tl.bfloat16 and powers_of_two(right):
        product = (widened(left).data * widened(right).data).astype(ml_dtypes.bfloat16)
        return interpreter.TensorHandle(product.view(np.uint16), tl.bfloat16)
    if tl.bfloat16 in (left.dtype.scalar, right.dtype.scalar) and op not in BITWISE:
        raise TypeError(f"{op.__name__} of bfloat16 in a kernel: convert to float32 first")
    return combine(self, left, right, op)


def fma(self, x, y, z):
    """A product and a sum that are rounded once."""
    exact = x.data.astype(np.float64) * y.data + z.data
    return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)


def exp(self, x):
    """Rounded once: NumPy's in float32 is twice as far off as torch's, which is what meanings have."""
    with np.errstate(all="ignore"):
        exact = np.exp(x.data.astype(np.float64))
    return interpreter.TensorHandle(exact.astype(x.data.dtype), x.dtype.scalar)


def exp2(self, x):
    """As exp."""
    with np.errstate(all="ignore"):
        exact = np.exp2(x.data.astype(np.float64))
    return interpreter.TensorHandle(exact.astype(x.data.dtype), x.dtype.scalar)


def scanned(self, values):
    """In log2(n) rounds, as the threads of a warp do: each value takes what stands 1, 2, 4, .. before it."""
    own = [v.handle.data for v in values]
    if self.reverse:
        own = [np.flip(x, self.axis) for x in own]
    length = own[0].shape[self.axis]
    place = np.arange(length).reshape([length if i == self.axis else 1 for i in range(own[0].ndim)])
    step = 1
    while step < length:
        before = [np.roll(x, step, self.axis) for x in own]
        made = self.combine_fn.fn(*(self.to_tensor(x, v.dtype) for x, v in zip(before + own, [*values] * 2)))
        made = made if isinstance(made, tuple) else (made,)
        own = [np.where(place < step, x, m.handle.data) for x, m in zip(own, made)]
        step *= 2
    if self.reverse:
        own = [np.flip(x, self.axis) for x in own]
    return [self.to_tensor(x, v.dtype) for x, v in zip(own, values)]


@functools.cache
def patched(fn):
    """Once a function: Triton patches its language at each call of one, patch upon patch, and that took most
    of the time of a test. The kernel around it has patched ``tl``; what is left is ``tl.core``, for good.
    """
    interpreter._patch_lang(fn)


def called(self, *args, **kwargs):
    """A function of a kernel."""
    patched(self.fn)
    return self.rewrite()(*args, **kwargs)


interpreter._convert_float = convert
interpreter._mxfp_value_handle_to_float32 = scaled_operand
Builder.create_dot, Builder.create_fma, Builder.create_exp = dot, fma, exp
Builder.create_exp2, Builder.binary_op = exp2, binary
interpreter.ScanOps.apply_impl, interpreter.InterpretedFunction.__call__ = scanned, called
