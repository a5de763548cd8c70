"""Writes down what a compiled graph does, as calls that can be made again on the same tensors.

    generated code     every kernel it starts, with its arguments; the memory it takes is kept
    an op of ours      its C calls, if it makes no others but by torch, and reads nothing on the host
    any other op       itself, and a copy of what it returns to where it was returned the first time

Everything that computes is one of these: torch tells of its ops, our ops of their C calls, and the generated
code runs with its own names replaced. What cannot be made again is refused, and the pass goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .kernels.native import unwritten, written_down
from .kernels.op import NAMESPACE, OPS, Implementation
from .program import Call
from .torch_private import instead_of_generated_code

COLLECTIVES = ("_c10d_functional", "c10d", "c10d_functional", "symm_mem")
MAKE_MEMORY = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
KERNEL = "cpp_"  # how the names of Inductor's kernels for CPUs begin
HARMLESS = (
    "reinterpret_tensor",
    "torch",
    "aten",
    "inductor_ops",
    "extern_kernels",
)  # names of generated code
READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)  # of values, past the dispatcher


class Recording(TorchDispatchMode):
    """What runs ``with recording.everything()`` on this thread. fixed: tensors that always have these values.

    calls: in order. kept: what they point to. refused: why they would not do the same, or empty.
    """

    def __init__(self, fixed: Sequence[Tensor]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.kept: list[Any] = []
        self.refused = ""
        self._fixed = {t.untyped_storage().data_ptr() for t in fixed}
        self._inside, self._reads, self._pieces = False, 0, 0

    @contextmanager
    def ops(self) -> Iterator[None]:
        """Write down the ops inside."""
        with written_down(self.calls, self.kept), HostReads(self), self:
            yield

    @contextmanager
    def everything(self) -> Iterator[None]:
        """Write down the ops inside, and what graphs do."""
        with instead_of_generated_code(self._generated), self.ops():
            yield
        if not self._pieces:
            self._refuse("no code that Inductor generated ran")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, begin = kwargs or {}, len(self.calls)
        if gives_numbers(func):
            for t in args:
                self.read(t)
            return func(*args, **kwargs)
        implementation = implementation_of(func)
        if implementation is not None and implementation.by_address:
            result, again = self._inside_of(implementation.fn, args, kwargs)
        else:
            result, again = func(*args, **kwargs), False
        self.kept.append(result)
        if not again:
            del self.calls[begin:]  # then it is one call, whatever it calls itself
            self._write(func, implementation.fn if implementation else func, args, kwargs, result)
        return result

    def read(self, t: Any) -> None:
        """The host looks at values of ``t``. Inside an op that makes the op one call."""
        if isinstance(t, Tensor) and t.numel() and t.untyped_storage().data_ptr() not in self._fixed:
            self._reads += 1
            if not self._inside:
                self._refuse("the host reads numbers that may differ in another step")

    def _refuse(self, why: str) -> None:
        self.refused = self.refused or why

    def _inside_of(self, function: Callable[..., Any], args: tuple, kwargs: dict) -> tuple[Any, bool]:
        """The result of an op's own code, and whether its calls may stand for it."""
        outer = self._inside, self._reads
        self._inside, self._reads = True, 0
        try:
            begin = len(self.calls)
            with HostReads(self), self:
                result = function(*args, **kwargs)
            return result, not self._reads and (unwritten, ()) not in self.calls[begin:]
        finally:
            self._inside, self._reads = outer

    def _write(self, op: Any, function: Callable[..., Any], args: tuple, kwargs: dict, result: Any) -> None:
        """Note an op as one call."""
        if op.namespace in COLLECTIVES:
            return self._refuse(f"{op} waits for other ranks")
        if op.is_view or op.overloadpacket.__name__ in MAKE_MEMORY:
            return None
        if torch.Tag.dynamic_output_shape in op.tags:
            return self._refuse(f"{op} returns as many rows as its values say")
        results = result if isinstance(result, (tuple, list)) else () if result is None else (result,)
        fresh = [i for i, r in enumerate(op._schema.returns) if r.alias_info is None]
        where = [(i, results[i]) for i in fresh]
        self.calls.append((again, (function, args, kwargs, where)))
        return None

    def _generated(self, code: Callable[..., Any], args: list[Any]) -> Any:
        """Run generated code, every name that computes or takes memory replaced."""
        owner = (code.__self__,) if isinstance(code, MethodType) else ()
        function = code.__func__ if isinstance(code, MethodType) else code
        if not isinstance(function, FunctionType):
            self._refuse(f"generated code is wrapped in a {type(function).__name__}")
            return code(args)
        self._pieces += 1
        self.kept.append(list(args))
        names = dict(function.__globals__)
        for name in function.__code__.co_names:
            if name not in names or name in HARMLESS or isinstance(names[name], Tensor):
                continue
            if name.startswith(KERNEL):
                names[name] = self._kernel(names[name])
            elif name == "empty_strided_cpu":
                names[name] = self._memory(names[name])
            else:
                self._refuse(f"generated code calls {name}")
        return FunctionType(function.__code__, names, function.__name__)(*owner, args)

    def _kernel(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> None:
            self.calls.append((kernel, args))
            kernel(*args)

        return run

    def _memory(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any) -> Tensor:
            self.kept.append(made := make(*args))
            return made

        return run


class HostReads(TorchFunctionMode):
    """Tells a recording of reads that go past the dispatcher."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            self.recording.read(args[0])
        return func(*args, **(kwargs or {}))


def gives_numbers(func: Any) -> bool:
    """Whether an op returns values to the host, as item() and equal() do."""
    returns = func._schema.returns
    return bool(returns) and not any("Tensor" in str(r.type) for r in returns)


def implementation_of(func: Any) -> Implementation | None:
    """What computes an overload of one of our ops; None for a meaning and for other ops."""
    if func.namespace != NAMESPACE:
        return None
    op = OPS.get(func.overloadpacket.__name__)
    return op.implementations.get(func._overloadname) if op else None


def again(
    function: Callable[..., Any], args: tuple, kwargs: dict[str, Any], where: list[tuple[int, Tensor]]
) -> None:
    """Call an op and put what it returns anew where it was the first time."""
    result = function(*args, **kwargs)
    results = result if isinstance(result, (tuple, list)) else (result,)
    for i, place in where:
        assert results[i].shape == place.shape, f"{function} returned {results[i].shape}, not {place.shape}"
        place.copy_(results[i])
