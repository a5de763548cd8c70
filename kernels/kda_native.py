"""KDA's prefill ops in C++ on a CPU: rows of one token on the state itself, longer ones chunk by chunk.

    one token         step()         cpu/kda.cpp        each state is read once and written once
    several tokens    whole_rows()   kda_chunk_native   the meaning's chunks; a row's bits are its own affair

Where longer rows would gain nothing they go on as in the meaning, kda.forward, which is told who does a step.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from .exports import Export, exports_of
from .kda import Step, forward, kda_prefill, kda_prefill_into, one_step
from .kda_chunk import Inputs
from .kda_chunk_native import Row, cannot, whole_rows
from .kda_export import forward_export, kda_prefill_export, kda_prefill_export_into
from .native import entry, numbers, threads, unavailable, warn_once

NARROWEST = 8  # key channels: with fewer the error is above 1.1 times the meaning's
NOTE = "C++ that was compiled here"


def objection(q, k, v, g, beta, state, slots, cu, *more) -> str | None:
    """Why these arguments are not for here, or None; the first answer compiles the kernel."""
    if q.device.type != "cpu":
        return f"{q.device.type} tensors"
    given = [q, k, v, g, beta, state, *(m for m in more if isinstance(m, Tensor) and m.is_floating_point())]
    if wrong := sorted({str(t.dtype) for t in given} - {"torch.float32"}):
        return f"some arguments are {', '.join(wrong)}, not float32"
    if isinstance(k.shape[2], int) and k.shape[2] < NARROWEST:
        return f"keys of {k.shape[2]} channels, where only {NARROWEST} or more are as exact as the meaning's"
    return unavailable("kda")


def step(
    inputs: Inputs,
    state: Tensor,
    slots: list[int],
    tokens: list[int],
    out: Tensor | None,
    start: int,
    isa: str | None = None,
) -> None:
    """As kda.one_step, float32, in place; isa: an instruction set (default: this CPU's best).

    A state whose key channels are not side by side is left to kda.one_step.
    """
    if state.stride(3) != 1:
        return one_step(inputs, state, slots, tokens, out, start)
    ready = [beside(x) for x in inputs]
    target = None if out is None else beside(out)
    parts: list[int] = []
    for x in (*ready, target):
        parts += (0, 0, 0) if x is None else (x.data_ptr(), *x.stride()[:2])
    heads, values, keys = state.shape[1:]
    places, rows = numbers(slots), numbers(tokens)
    entry("kda", "k3_kda_step", "30q", isa)(
        *parts,
        state.data_ptr(),
        *state.stride()[:3],
        places.buffer_info()[0],
        rows.buffer_info()[0],
        len(slots),
        heads,
        keys,
        values,
        start,
        threads(),
    )
    if target is not out:
        at = [t + start for t in tokens]
        out[at] = target[at]


def beside(x: Tensor) -> Tensor:
    """x [T, H, channels] with its channels side by side; x [T, H] as it is."""
    return x if x.stride()[2:] in ((), (1,)) else x.contiguous()


def stepper() -> Step:
    """The step in C++; where code that was compiled elsewhere finds none, the meaning's, with a warning."""
    if reason := unavailable("kda"):
        warn_once(reason)
        return one_step
    return step


def prefill(
    inputs: Inputs,
    state: Tensor,
    slots: Tensor,
    cu: Tensor,
    out: Tensor,
    start: int = 0,
    columns: tuple[Tensor, Tensor] | None = None,
) -> None:
    """All rows, as kda_export.forward_export; columns: export_offset and export_slot, or None."""
    if not slots.shape[0]:
        return
    if state.stride()[3] != 1 or cannot():
        if columns is None:
            return forward(inputs, state, slots, cu.tolist(), out, start, step=stepper())
        return forward_export(inputs, state, slots, cu, *columns, out, start, stepper())
    bounds, place = cu.tolist(), slots.tolist()
    if columns is None and bounds[-1] == len(place) and all(a < b for a, b in pairwise(bounds)):
        return step(inputs, state, place, bounds[:-1], out, start)  # decode: every row is one token
    exports = exports_of(*columns, slots, bounds, len(state)) if columns else []
    leaves = {e.row: e for e in exports if e.offset > 1}
    lengths = [end - begin for begin, end in pairwise(bounds)]
    after_one(inputs, state, [e for e in exports if e.offset == 1 < lengths[e.row]], bounds, place)
    singles = [r for r, n in enumerate(lengths) if n == 1]
    if singles:
        step(inputs, state, [place[r] for r in singles], [bounds[r] for r in singles], out, start)
    for e in exports:
        if lengths[e.row] == 1:
            state[e.slot] = state[place[e.row]]
    rows = [
        Row(place[r], bounds[r], n, *leaves.get(r, (0, 0, 0))[1:]) for r, n in enumerate(lengths) if n > 1
    ]
    whole_rows(inputs, state, rows, out, start)


def after_one(
    inputs: Inputs, state: Tensor, exports: list[Export], bounds: list[int], place: list[int]
) -> None:
    """Checkpoints after the first token of longer rows, which have not run yet: the bits of a row of one."""
    for e in exports:
        state[e.slot] = state[place[e.row]]
    if exports:
        step(inputs, state, [e.slot for e in exports], [bounds[e.row] for e in exports], None, 0)


def fresh(v: Tensor, cu: Tensor) -> Tensor:
    """What the rows are written to: like v, zero past cu[-1]."""
    out, end = torch.empty_like(v, memory_format=torch.contiguous_format), cu.tolist()[-1]
    if end < out.shape[0]:
        out[end:] = 0.0
    return out


@kda_prefill.impl("native", objection=objection, note=NOTE, by_address=True)
def prefill_native(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, slots: Tensor, cu: Tensor
) -> Tensor:
    """As the meaning."""
    out = fresh(v, cu)
    prefill(Inputs(q, k, v, g, beta), state, slots, cu, out)
    return out


@kda_prefill_into.impl("native", objection=objection, note=NOTE, by_address=True)
def prefill_into_native(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    cu: Tensor,
    out: Tensor,
    start: int,
) -> None:
    """As the meaning."""
    prefill(Inputs(q, k, v, g, beta), state, slots, cu, out, start)


@kda_prefill_export.impl("native", objection=objection, note=NOTE, by_address=True)
def prefill_export_native(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    cu: Tensor,
    export_offset: Tensor,
    export_slot: Tensor,
) -> Tensor:
    """As the meaning; its bits are those of the other three."""
    out = fresh(v, cu)
    prefill(Inputs(q, k, v, g, beta), state, slots, cu, out, 0, (export_offset, export_slot))
    return out


@kda_prefill_export_into.impl("native", objection=objection, note=NOTE, by_address=True)
def prefill_export_into_native(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    cu: Tensor,
    export_offset: Tensor,
    export_slot: Tensor,
    out: Tensor,
    start: int,
) -> None:
    """As the meaning."""
    prefill(Inputs(q, k, v, g, beta), state, slots, cu, out, start, (export_offset, export_slot))
