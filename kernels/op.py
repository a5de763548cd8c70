"""An op is its meaning: a plain torch function, declared once, that implementations must equal.

    @op(writes=("state",))
    def kda_prefill(q, k, v, g, beta, state, slots, cu) -> Tensor: ...     the meaning
    @kda_prefill.fake                                                      shapes and dtypes only
    @kda_prefill.samples                                                   inputs to test and to tune with
    @kda_prefill.opened                                                    the same, as traceable ATen
    @kda_prefill.impl("cpu", objection=...)                                another way to compute it

The op is registered as ``torch.ops.k3.<name>``. ``Library.define`` and ``impl`` are used and not
``torch.library.custom_op``, whose dispatch costs three to four times as much; a layer calls three ops.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "k3"
MAX_READS = 10  # arguments an op may read; what it writes is counted apart
MAX_READS_FUSED = 16  # of one that does the work of several
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
OPS: dict[str, Op] = {}


@dataclass(frozen=True)
class Tolerance:
    """Largest error an implementation may show against the float64 meaning, relative to the largest value."""

    float32: float = 1e-5
    bfloat16: float = 1.6e-2
    float64: float = 1e-11

    def of(self, dtype: torch.dtype) -> float:
        """The bound for results of ``dtype`` (float32, bfloat16 or float64)."""
        return getattr(self, str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op. ``objection(*args)`` says why it cannot, or returns None. note: what else a
    report should say where it is chosen. tolerance: its own, where that is not the op's; such a one computes
    something coarser, and is chosen only where a user names it. by_address: it calls nothing but torch and
    native.entry, so that its calls can be written down and made again.
    """

    provider: str
    fn: Callable[..., Any]
    objection: Callable[..., str | None]
    note: str = ""
    tolerance: Tolerance | None = None
    by_address: bool = False

    @property
    def asked_for(self) -> bool:
        """Whether only a user who names it gets it."""
        return self.tolerance is not None


@dataclass
class Op:
    """A meaning and everything other layers ask of it; made by :func:`op`."""

    name: str
    meaning: Callable[..., Any]
    writes: tuple[str, ...]
    pure: bool
    opaque: bool
    tolerance: Tolerance
    implementations: dict[str, Implementation] = field(default_factory=dict)
    open_form: Callable[..., Any] | None = None
    make_samples: Callable[[torch.dtype], Iterable[tuple]] | None = None
    fake_form: Callable[..., Any] | None = None

    @property
    def overload(self) -> torch._ops.OpOverload:
        """The ``torch.ops.k3.<name>.default`` that stands in graphs."""
        return getattr(torch.ops.k3, self.name).default

    def __call__(self, *args: Any) -> Any:
        return self.overload(*args)

    def fake(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Register what the op returns for tensors without data."""
        torch.library.register_fake(f"{NAMESPACE}::{self.name}", fn, lib=LIBRARY)
        self.fake_form = fn
        return fn

    def samples(
        self, fn: Callable[[torch.dtype], Iterable[tuple]]
    ) -> Callable[[torch.dtype], Iterable[tuple]]:
        """Register a generator of argument tuples for a model dtype, empty and one-row cases included."""
        self.make_samples = fn
        return fn

    def opened(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Register a form without data-dependent control flow, for tracing into ATen."""
        self.open_form = fn
        return fn

    def impl(
        self,
        provider: str,
        objection: Callable[..., str | None] = lambda *args: None,
        note: str = "",
        tolerance: Tolerance | None = None,
        by_address: bool = False,
    ):
        """Register another implementation; lowering picks it where ``objection`` returns None, and one with a
        tolerance of its own where the user names it.

        It becomes the overload ``torch.ops.k3.<name>.<provider>``, with the op's own signature. The fake has
        to be registered before.
        """

        def register(fn: Callable[..., Any]) -> Callable[..., Any]:
            assert self.fake_form is not None, f"{self.name}: the fake comes before an implementation"
            overload = f"{self.name}.{provider}"
            signature = str(self.overload._schema).removeprefix(f"{NAMESPACE}::{self.name}")
            LIBRARY.define(overload + signature, tags=[torch.Tag.pt2_compliant_tag])
            LIBRARY.impl(overload, unseen_by_dynamo(fn), "CompositeExplicitAutograd")
            torch.library.register_fake(f"{NAMESPACE}::{overload}", self.fake_form, lib=LIBRARY)
            self.implementations[provider] = Implementation(
                provider, fn, objection, note, tolerance, by_address
            )
            return fn

        return register

    def each_sample(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple]:
        """The sample arguments for a model dtype, built anew so that a writing op may change them."""
        if self.make_samples is None:
            raise LookupError(f"op {self.name} declares no samples")
        yield from self.make_samples(dtype)


def op(
    *,
    writes: tuple[str, ...] = (),
    opaque: bool = False,
    tolerance: Tolerance | None = None,
    fused: bool = False,
) -> Callable[[Callable[..., Any]], Op]:
    """Declare ``torch.ops.k3.<fn name>`` with ``fn`` as its meaning.

    writes: names of the arguments the op mutates. opaque: the meaning looks at tensor values, so lowering
    must not trace it (an ``opened`` form may still exist). fused: it does the work of several ops, and may
    read more arguments. Raises ValueError for an undeclarable signature.
    """

    def declare(fn: Callable[..., Any]) -> Op:
        name = fn.__name__
        parameters = list(inspect.signature(fn).parameters)
        check_signature(name, parameters, writes, MAX_READS_FUSED if fused else MAX_READS)
        schema = torch.library.infer_schema(fn, mutates_args=writes, op_name=name)
        LIBRARY.define(schema, tags=[torch.Tag.pt2_compliant_tag])
        LIBRARY.impl(name, unseen_by_dynamo(fn), "CompositeExplicitAutograd")
        made = Op(name, fn, writes, not writes, opaque, tolerance or Tolerance())
        if not opaque:
            made.open_form = fn
        OPS[name] = made
        made.__doc__ = fn.__doc__
        return made

    return declare


def unseen_by_dynamo(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of ``fn`` that Dynamo never traces, nor what it calls; ``fn`` itself it still does.

    Where Dynamo leaves a function of the user to Python it watches every Python frame below it, the body of
    an op too: it would compile that body, or break on the tensor values the body looks at. The mark is on
    the code, so that a call costs nothing (``torch.compiler.disable`` adds 0.4 us, and imports Dynamo).
    """
    code = fn.__code__.replace()
    watcher = torch._C._dynamo.eval_frame
    skip = watcher._FrameAction.SKIP
    watcher.set_code_exec_strategy(code, watcher._FrameExecStrategy(skip, skip))
    copy = types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy


def check_signature(name: str, parameters: list[str], writes: tuple[str, ...], most: int = MAX_READS) -> None:
    """Refuse a name twice, an unknown written argument, and too many arguments."""
    if name in OPS:
        raise ValueError(f"op {name} is declared twice")
    unknown = [w for w in writes if w not in parameters]
    if unknown:
        raise ValueError(f"op {name} writes {unknown}, which are not among its arguments {parameters}")
    reads = len(parameters) - len(writes)
    if reads > most:
        raise ValueError(f"op {name} reads {reads} arguments, at most {most}: make a mode a second op")


def acc(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are kept in: float32, or float64 for a float64 model."""
    return torch.promote_types(dtype, torch.float32)


def acc_of(x: Tensor) -> Tensor:
    """``x`` in its accumulation dtype."""
    return x.to(acc(x.dtype))
