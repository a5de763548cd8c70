"""KDA under speculation as it was before records: the state after every row of drafts, in a slot of its own.

    slots [r]       S -> o of every row, the bits of kda_verify
    scratch [r, i]  S_i, the state after row i          whoever keeps m rows goes on from scratch [r, m - 1]

A request owns K + 1 slots for K drafts instead of one; nothing has to be committed. The slot it lives in may
be one of its own targets: it is read before any of them is written.
T token rows, R requests, H heads, K and V key and value channels, S slots, J columns of scratch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .kda import kda_samples
from .kda_chunk import IN_PLACE_ELEMENTS, Inputs
from .kda_verify import rows_that_fit, run
from .op import op


@op(writes=("state",), opaque=True)
def kda_verify_states(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    cu: Tensor,
    scratch: Tensor,
) -> Tensor:
    """The outputs of kda_verify; the state after row i of request r goes to state(a!)[scratch[r, i]].

    scratch [R, J] int64. Columns past a shorter row are not looked at. Raises ValueError, before anything is
    written, when a row is longer than J, a target stands twice or is another request's slot.
    """
    out = v.new_zeros(v.shape)
    verify_states(Inputs(q, k, v, g, beta), state, slots, cu.tolist(), scratch, out, 0)
    return out


@kda_verify_states.fake
def _(q, k, v, g, beta, state, slots, cu, scratch) -> Tensor:
    return v.new_empty(v.shape)


@kda_verify_states.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    for args in kda_samples(dtype, ([], [1], [3, 2, 0], [5])):
        yield *args, targets(args[6], args[7], len(args[5]))


def targets(slots: Tensor, cu: Tensor, count: int) -> Tensor:
    """Scratch columns [R, 5] out of ``count`` slots: a row's own slot, then free ones, 0 past the row."""
    free = [slot for slot in range(1, count) if slot not in slots.tolist()]
    lines = [
        [slot, *(free.pop() if i < n else 0 for i in range(1, 5))]
        for slot, n in zip(slots.tolist(), cu.diff().tolist())
    ]
    return torch.tensor(lines, dtype=torch.int64).view(len(lines), 5)


@op(writes=("state", "out"), opaque=True)
def kda_verify_states_into(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    cu: Tensor,
    scratch: Tensor,
    out: Tensor,
    start: int,
) -> None:
    """kda_verify_states, with the results written to rows [start, start + cu[-1]) of out(b!) [T2, H, V]."""
    verify_states(Inputs(q, k, v, g, beta), state, slots, cu.tolist(), scratch, out, start)


@kda_verify_states_into.fake
def _(q, k, v, g, beta, state, slots, cu, scratch, out, start) -> None:
    return None


@kda_verify_states_into.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    for args in kda_samples(dtype, ([], [4, 1])):
        v = args[2]
        yield *args, targets(args[6], args[7], len(args[5])), v.new_full((len(v) + 5, *v.shape[1:]), 7.0), 3


def verify_states(
    inputs: Inputs, state: Tensor, slots: Tensor, bounds: list[int], scratch: Tensor, out: Tensor, start: int
) -> None:
    """Every row as one chunk that reads its state; then the states one after another."""
    rows, lengths = rows_that_fit(bounds, scratch.shape[1], "scratch has slots for")
    if not rows:
        return
    place = slots.tolist()
    homes, begins = [place[r] for r in rows], [bounds[r] for r in rows]
    into = targets_of(scratch, rows, lengths, homes)
    u = run(inputs, state, homes, begins, lengths, out, start)
    leave = leave_in_place if state[0].numel() >= IN_PLACE_ELEMENTS else leave_copies
    leave(inputs, u, state, homes, begins, into)


def targets_of(scratch: Tensor, rows: list[int], lengths: list[int], homes: list[int]) -> list[list[int]]:
    """The slots of each row's states; see :func:`kda_verify_states` for what is refused."""
    columns = scratch.tolist()
    into = [columns[r][:n] for r, n in zip(rows, lengths)]
    taken = [slot for line in into for slot in line]
    elsewhere = [slot for line, home in zip(into, homes) for slot in line if slot != home and slot in homes]
    if len(set(taken)) < len(taken) or elsewhere:
        raise ValueError(
            f"scratch {into} for requests in slots {homes}: a state needs a slot of its own, which no other "
            "request lives in or writes"
        )
    return into


def leave_copies(
    inputs: Inputs, u: Tensor, state: Tensor, homes: list[int], begins: list[int], into: list[list[int]]
) -> None:
    """Small states: row i of all requests that have one at a time."""
    device = state.device
    order = sorted(range(len(into)), key=lambda r: -len(into[r]))
    u = u.index_select(0, torch.tensor(order, device=device))
    now = state.index_select(0, torch.tensor([homes[r] for r in order], device=device))  # [R, H, V, K]
    for i in range(len(into[order[0]])):
        live = [r for r in order if len(into[r]) > i]
        token = torch.tensor([begins[r] + i for r in live], device=device)
        k, g = (x.index_select(0, token).to(state.dtype) for x in (inputs.k, inputs.g))  # [R, H, K]
        now = now[: len(live)]
        now.mul_(g.exp_().unsqueeze(2)).addcmul_(u[: len(live), i].unsqueeze(3), k.unsqueeze(2))
        state.index_copy_(0, torch.tensor([into[r][i] for r in live], device=device), now)


def leave_in_place(
    inputs: Inputs, u: Tensor, state: Tensor, homes: list[int], begins: list[int], into: list[list[int]]
) -> None:
    """Large states: each written once, from the one before it."""
    for r, line in enumerate(into):
        before = state[homes[r]]
        for i, slot in enumerate(line):
            k, g = (x[begins[r] + i].to(state.dtype) for x in (inputs.k, inputs.g))  # [H, K]
            torch.mul(before, g.exp().unsqueeze(1), out=state[slot])
            before = state[slot].addcmul_(u[r, i].unsqueeze(2), k.unsqueeze(1))
