"""Ask compiled calls for checkpoints of their KDA state, and read those that no slot of the caller's holds.

    with k3compile.export_at([128, 0], slots=[7, 0]):   row 0: state after 128 tokens -> slot 7 of each pool
        compiled(...)
    with k3compile.export_at([128, 0]):                 models that are handed their states, without slots
        compiled(...)
    k3compile.checkpoints(compiled).states[layer][row]

The pass :mod:`.passes.state_export` gives graphs the inputs; here are the tensors behind them. A context
variable holds what is asked for, so that threads do not see each other's; without it the tensors are zeros
made once a graph. The engine's forward sets the same variable from its ``Step``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from .extra_inputs import PER_GRAPH, Supplier
from .passes.extra_inputs import ExtraInput
from .passes.state_export import OFFSET, POOL, SEQUENCE_OFFSET, SLOT
from .torch_private import function_compiled

EXPORT_ROWS = 256  # rows of a call that may export where no runtime says how many requests it holds
LARGEST = 2**31 - 1
_serial = count()


class Checkpoints(NamedTuple):
    """What a call exported, per call site in graph order; rows without an offset are zero."""

    offsets: tuple[int, ...]  # tokens after which each sequence was exported, 0 for none
    states: tuple[Tensor, ...]  # [N, H, V, K] of each KDA call
    windows: tuple[Tensor, ...]  # [N, 3, C] of each convolution


class Request:
    """Checkpoints somebody asked for: an entry a row, and the pools that calls have filled since."""

    def __init__(self, offset: Tensor, slot: Tensor | None) -> None:
        self.offset, self.slot, self.serial = offset, slot, next(_serial)
        self.taken = False  # whether any graph has asked for it
        self.failed = False  # whether a call inside may have stopped half way
        self.pools: dict[tuple, tuple[str, Tensor, Any]] = {}  # one a function and layer, in order of calls
        self._columns: dict[tuple, Tensor] = {}

    def column(self, given: Tensor, what: str, length: int, device: torch.device) -> Tensor:
        """``given`` as int32 [length] on ``device``. Raises ValueError where it is longer."""
        key = what, length, device
        if (made := self._columns.get(key)) is None:
            if len(given) > length:
                raise ValueError(
                    f"{len(given)} {what}s are given, and the graph was compiled for {length}: an entry for "
                    "each row of a call, no more"
                )
            made = given
            if len(given) < length or given.dtype != torch.int32 or given.device != device:
                made = torch.zeros(length, dtype=torch.int32, device=device)
                made[: len(given)] = given
            self._columns[key] = made
        return made


_asked: ContextVar[Request | None] = ContextVar("k3_export", default=None)
_latest: ContextVar[Request | None] = ContextVar("k3_exported", default=None)
_of_parameter = WeakTensorKeyDictionary()  # first parameter of a call -> the last Request it filled pools of


@contextmanager
def export_at(offsets: Sequence[int] | Tensor, slots: Sequence[int] | Tensor | None = None) -> Iterator[None]:
    """Inside, calls of graphs compiled with ``backend="k3"`` leave checkpoints of their KDA state.

    offsets: one an entry of the call's own ``cu``, or a sequence of its batch: after so many of its tokens,
    0 for none. slots: where to, in the pools that the model was given; None for a model without slots, whose
    checkpoints :func:`checkpoints` returns. Entries that are missing count as 0; a graph compiled without our
    runtime takes at most 256, or as many as its batch has sequences. Every call inside exports: leave the
    context before decoding goes on.

    Raises ValueError for entries that are not whole numbers from 0 to 2^31 - 1, for slots of another length,
    and at the end where no call inside could export, so that nobody resumes from a slot that was not written;
    the call itself raises it for an offset outside its row and a slot that cannot be.
    """
    offset = column_of("offsets", offsets)
    slot = None if slots is None else column_of("slots", slots)
    if slot is not None and len(slot) != len(offset):
        raise ValueError(f"export_at got {len(offset)} offsets and {len(slot)} slots; it needs one for each")
    request = Request(offset, slot)
    with asking(request):
        try:
            yield
        except BaseException:
            request.failed = True
            raise
    if offset.any() and not request.taken:
        raise ValueError(
            "nothing inside export_at exported: no graph that was called has KDA calls which "
            'torch.compile(backend="k3") gave exports; its report says why (state_export)'
        )


@contextmanager
def asking(request: Request) -> Iterator[None]:
    """Inside, ``request`` is what calls of this thread are asked for."""
    token = _asked.set(request)
    try:
        yield
    finally:
        _asked.reset(token)


def column_of(name: str, given: Sequence[int] | Tensor) -> Tensor:
    """An int32 tensor of numbers a user gave."""
    values = given.tolist() if isinstance(given, Tensor) else list(given)
    wrong = [v for v in values if not isinstance(v, int) or isinstance(v, bool) or not 0 <= v <= LARGEST]
    if wrong:
        raise ValueError(f"export_at wants whole numbers from 0 to {LARGEST} as {name}, got {wrong[0]!r}")
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.int32)


def checkpoints(compiled: Any) -> Checkpoints:
    """What the last :func:`export_at` around a call of ``compiled`` exported, for a model without slots.

    compiled: what ``torch.compile`` returned, or the model itself; of a function without parameters, the last
    export of this thread. A second call inside one ``export_at`` replaces the first one's.

    Raises ValueError where nothing was exported, saying what to do, where the ``export_at`` ended with an
    error, so that a pool may be half written, and for what cannot be called.
    """
    if not callable(compiled):
        raise ValueError(f"checkpoints wants what torch.compile returned, got {type(compiled).__name__}")
    parameters = parameters_of(compiled)
    found = [r for p in parameters if (r := _of_parameter.get(p)) is not None]
    request = max(found, key=lambda r: r.serial, default=None) if parameters else _latest.get()
    if request is None:
        raise ValueError(
            "nothing was exported: call the compiled model inside `with k3compile.export_at(offsets):`. Its "
            "report says what became of each KDA call (state_export); a model with slots keeps its "
            "checkpoints in its own pools"
        )
    if request.failed:
        raise ValueError(
            "the last export_at ended with an error, and what it exported may not be complete: call the "
            "compiled model inside a new one"
        )
    owners = {id(p) for p in parameters}
    pools = [
        (family, pool)
        for family, pool, owner in request.pools.values()
        if not parameters or (owner is not None and id(owner()) in owners)
    ]
    states, windows = (
        tuple(row for family, pool in pools if (family == "conv_scan") is conv for row in pool.unbind(0))
        for conv in (False, True)
    )
    return Checkpoints(tuple(request.offset.tolist()), states, windows)


def parameters_of(compiled: Any) -> list[Tensor]:
    """The parameters of a compiled module, or of the module whose method was compiled."""
    original = getattr(compiled, "_torchdynamo_orig_callable", compiled)
    for candidate in (compiled, getattr(original, "__self__", None), original):
        if isinstance(candidate, nn.Module):
            return list(candidate.parameters())
    return []


def column_supplier(extra: ExtraInput) -> Supplier:
    """The offsets or the slots, as long as this graph wants them."""
    zeros, key = extra.example, extra.key
    length, device = zeros.shape[0], zeros.device

    def supply(args: Sequence[Any]) -> Tensor:
        request = _asked.get()
        if request is None:
            return zeros
        request.taken = True
        if key == SEQUENCE_OFFSET:
            if request.slot is not None:
                raise ValueError(
                    "export_at was given slots, and this model keeps its states outside of slots"
                )
            return request.column(request.offset, "offset", length, device)
        if request.slot is None:
            if request.offset.any():
                raise ValueError(
                    "export_at was given no slots, and this model keeps its states in slots: "
                    "export_at(offsets, slots) says where the checkpoints go"
                )
            return zeros
        given, what = (request.slot, "slot") if key == SLOT else (request.offset, "offset")
        return request.column(given, what, length, device)

    return supply


def pool_supplier(extra: ExtraInput) -> Supplier:
    """The pool of one graph: the same one while nobody asks, a fresh one for each call that exports.

    Graphs that Dynamo makes of one function, for other sizes or modes, replace each other's.
    """
    idle, family = extra.example, extra.key.removeprefix(POOL)
    function = function_compiled()

    def supply(args: Sequence[Any]) -> Tensor:
        request = _asked.get()
        if request is None:
            return idle
        with torch.inference_mode(False):
            pool = torch.zeros_like(idle)
        owner = next((arg for arg in args if isinstance(arg, nn.Parameter)), None)
        known = None if owner is None else weakref.ref(owner)
        request.pools[function, family, id(owner)] = family, pool, known
        if owner is not None:
            _of_parameter[owner] = request
        _latest.set(request)
        return pool

    return supply


PER_GRAPH |= dict.fromkeys((OFFSET, SLOT, SEQUENCE_OFFSET), column_supplier) | {POOL: pool_supplier}
