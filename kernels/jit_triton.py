"""What the Triton files share: kernels that start Triton only when one runs, their launches, and refusals.

    @jit                        a Kernel: the plain function, nothing imported
    launch(kernel, grid, ..)    the first one imports Triton and hands every kernel of that file to it
    with recording("sm_90")     launches are noted instead of made: what would be compiled, and how

Importing Triton takes half a second that a CPU user need not pay, so ``tl`` is a stand-in until then.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import prod
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float32)  # what the kernels compute from and to
VECTOR = 16  # bytes of the widest load of a thread


class tl:
    """Stands for ``triton.language`` until a kernel of the file runs."""

    class constexpr:
        """Marks an argument that is compiled in."""


@dataclass
class Kernel:
    """A Triton kernel, or a function that kernels call, before Triton has seen it."""

    fn: Callable[..., Any]
    compiled: Any = None

    @property
    def name(self) -> str:
        return self.fn.__name__

    def awake(self) -> Any:
        """The kernel as Triton's own, and with it everything else that its file names.

        Triton reads the globals of a kernel's file, so the stand-ins in there are replaced: ``tl``, and the
        kernels, those that come from other files included.
        """
        if self.compiled is None:
            import triton

            self.compiled = triton.jit(self.fn)
            names = self.fn.__globals__
            names["tl"] = triton.language
            for name, one in list(names.items()):
                if isinstance(one, Kernel):
                    names[name] = one.awake()
        return self.compiled


def jit(fn: Callable[..., Any]) -> Kernel:
    """Mark a kernel; the file imports no Triton for it."""
    return Kernel(fn)


@dataclass(frozen=True)
class Launch:
    """One kernel of a call: with these arguments, on so many programs."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int


@dataclass
class Recording:
    """What a call would launch on ``target``."""

    target: str
    launches: list[Launch] = field(default_factory=list)


_RECORDING: ContextVar[Recording | None] = ContextVar("k3_triton_recording", default=None)
_DEVICE: ContextVar[str] = ContextVar("k3_triton_device", default="cuda")


@contextmanager
def recording(target: str) -> Iterator[Recording]:
    """Note what implementations launch, for arguments without data, instead of launching it."""
    made = Recording(target)
    token = _RECORDING.set(made)
    try:
        yield made
    finally:
        _RECORDING.reset(token)


@contextmanager
def interpreting() -> Iterator[None]:
    """Inside, kernels want tensors on a CPU: for a process with TRITON_INTERPRET=1, where none runs on a GPU.

    Everything else that keeps a kernel from some arguments is said as on a GPU.
    """
    token = _DEVICE.set("cpu")
    try:
        yield
    finally:
        _DEVICE.reset(token)


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, num_stages: int = 1, **constants: Any
) -> None:
    """Run ``kernel`` on ``grid`` programs, or note it. A grid without programs runs nothing."""
    if not prod(grid):
        return
    noted = _RECORDING.get()
    if noted is not None:
        noted.launches.append(Launch(kernel, grid, args, constants, num_warps, num_stages))
        return
    ready = kernel.awake() if isinstance(kernel, Kernel) else kernel
    first = next(a for a in args if isinstance(a, Tensor))
    if first.is_cuda:
        with torch.cuda.device(first.device):
            ready[grid](*args, **constants, num_warps=num_warps, num_stages=num_stages)
    else:
        ready[grid](*args, **constants, num_warps=num_warps, num_stages=num_stages)


def on_amd() -> bool:
    """Whether a launch now is for a GPU of AMD, whose warps are twice as wide."""
    noted = _RECORDING.get()
    return noted.target.startswith("gfx") if noted is not None else torch.version.hip is not None


def target() -> str:
    """The part a launch is for now, ``sm_90`` or ``gfx950``; empty without a GPU."""
    noted = _RECORDING.get()
    return noted.target if noted is not None else present()


@functools.cache
def present() -> str:
    """The GPU that is here, by the name compilers have for its kind."""
    if not torch.cuda.is_available():
        return ""
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0]
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


@functools.cache
def installed() -> bool:
    """Whether Triton can be imported; it is not, to find out."""
    return find_spec("triton") is not None


def no_gpu(*tensors: Tensor) -> str | None:
    """Why Triton cannot compute from these tensors, or None: where they are, and how they lie."""
    for tensor in tensors:
        if tensor.device.type != _DEVICE.get():
            return f"{tensor.device.type} tensors"
    if not installed():
        return "triton is not installed"
    return None


def wrong_dtype(*tensors: Tensor, allowed: tuple[torch.dtype, ...] = FLOATS) -> str | None:
    """Why their dtypes are not for a kernel, or None."""
    found = {t.dtype for t in tensors} - set(allowed)
    if found:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in found))
        return f"{names} where kernels take {' or '.join(str(d).removeprefix('torch.') for d in allowed)}"
    return None


def not_rows(**tensors: Tensor) -> str | None:
    """Why the named tensors are not made of dense rows that start where a vector load may, or None."""
    for name, t in tensors.items():
        if t.stride(-1) != 1:
            return f"{name} has elements {t.stride(-1)} apart along its last dimension, not side by side"
        steps = [t.storage_offset(), *t.stride()[:-1]]
        if any(isinstance(step, int) and step * t.element_size() % VECTOR for step in steps):
            return f"{name} has rows that do not start at a multiple of {VECTOR} bytes"
    return None


def first_objection(*reasons: str | None) -> str | None:
    """The first that is one. All are worked out, and those that look at sizes would put guards on a graph:
    what keeps a kernel from a device stands before this call.
    """
    return next((reason for reason in reasons if reason is not None), None)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n, and at least 1."""
    return 1 << max(0, n - 1).bit_length()


def blocks(n: int, size: int) -> int:
    """How many blocks of ``size`` cover n."""
    return -(-n // size)
