"""KDA under speculation in C++ on a CPU, beside kda_verify, kda_verify_states and kda_commit.

verify    whole_rows() of kda_chunk_native, which reads the state and keeps u
states    leave_states()     kda_fold_native, one pass over a state for all its rows
    commit    commit_states()    the same
"""

from __future__ import annotations

from torch import Tensor

from . import kda_native
from .kda_chunk import Inputs
from .kda_chunk_native import Row, cannot, whole_rows
from .kda_fold_native import commit_states, leave_states
from .kda_verify import commit_windows, kda_commit, kda_verify, kda_verify_into, moves_of, rows_that_fit
from .kda_verify_states import kda_verify_states, kda_verify_states_into, targets_of
from .native import left_to_meaning, unavailable

NOTE = kda_native.NOTE


def objection(q, k, v, g, beta, state, *more) -> str | None:
    """Why these arguments are not for here, or None; the first answer compiles the kernels."""
    if reason := kda_native.objection(q, k, v, g, beta, state, *more):
        return reason
    if state.stride(3) != 1:
        return "key channels of the state are not side by side"
    return cannot() or unavailable("kda_fold")


def verify(
    inputs: Inputs,
    state: Tensor,
    slots: Tensor,
    cu: Tensor,
    records: tuple[Tensor, ...],
    out: Tensor,
    start: int,
) -> None:
    """Every row reads its state; u, k and g go to ``records``."""
    if not slots.shape[0]:
        return
    bounds, place = cu.tolist(), slots.tolist()
    rows, lengths = rows_that_fit(bounds, records[0].shape[1], "the records hold")
    found = [Row(place[r], bounds[r], n, 0, place[r]) for r, n in zip(rows, lengths)]
    whole_rows(inputs, state, found, out, start, records)


@kda_verify.impl("native", objection=objection, note=NOTE, by_address=True)
def verify_native(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    cu: Tensor,
    rec_u: Tensor,
    rec_k: Tensor,
    rec_g: Tensor,
) -> Tensor:
    """As the meaning."""
    if left_to_meaning("kda_chunk"):
        return kda_verify.meaning(q, k, v, g, beta, state, slots, cu, rec_u, rec_k, rec_g)
    out = kda_native.fresh(v, cu)
    verify(Inputs(q, k, v, g, beta), state, slots, cu, (rec_u, rec_k, rec_g), out, 0)
    return out


@kda_verify_into.impl("native", objection=objection, note=NOTE, by_address=True)
def verify_into_native(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    cu: Tensor,
    rec_u: Tensor,
    rec_k: Tensor,
    rec_g: Tensor,
    out: Tensor,
    start: int,
) -> None:
    """As the meaning."""
    if left_to_meaning("kda_chunk"):
        return kda_verify_into.meaning(q, k, v, g, beta, state, slots, cu, rec_u, rec_k, rec_g, out, start)
    verify(Inputs(q, k, v, g, beta), state, slots, cu, (rec_u, rec_k, rec_g), out, start)


def verify_states(
    inputs: Inputs, state: Tensor, slots: Tensor, cu: Tensor, scratch: Tensor, out: Tensor, start: int
) -> None:
    """Every row reads its state; then the states one after another."""
    if not slots.shape[0]:
        return
    bounds, place = cu.tolist(), slots.tolist()
    rows, lengths = rows_that_fit(bounds, scratch.shape[1], "scratch has slots for")
    if not rows:
        return
    homes, begins = [place[r] for r in rows], [bounds[r] for r in rows]
    into = targets_of(scratch, rows, lengths, homes)
    u = state.new_empty(len(rows), max(lengths), *inputs.v.shape[1:])
    found = [Row(s, b, n, 0, i) for i, (s, b, n) in enumerate(zip(homes, begins, lengths))]
    whole_rows(inputs, state, found, out, start, (u,))
    leave_states(inputs, u, state, homes, begins, into)


@kda_verify_states.impl("native", objection=objection, note=NOTE, by_address=True)
def verify_states_native(
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
    """As the meaning; the outputs have the bits of verify_native."""
    if left_to_meaning("kda_chunk") or left_to_meaning("kda_fold"):
        return kda_verify_states.meaning(q, k, v, g, beta, state, slots, cu, scratch)
    out = kda_native.fresh(v, cu)
    verify_states(Inputs(q, k, v, g, beta), state, slots, cu, scratch, out, 0)
    return out


@kda_verify_states_into.impl("native", objection=objection, note=NOTE, by_address=True)
def verify_states_into_native(
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
    """As the meaning."""
    if left_to_meaning("kda_chunk") or left_to_meaning("kda_fold"):
        return kda_verify_states_into.meaning(q, k, v, g, beta, state, slots, cu, scratch, out, start)
    verify_states(Inputs(q, k, v, g, beta), state, slots, cu, scratch, out, start)


def commit_objection(state, window, rec_u, rec_k, rec_g, rec_x, *more) -> str | None:
    """The same for kda_commit, whose windows may be of any dtype."""
    pools = state, rec_u, rec_k, rec_g
    if state.device.type != "cpu":
        return f"{state.device.type} tensors"
    if wrong := sorted({str(pool.dtype) for pool in pools} - {"torch.float32"}):
        return f"some arguments are {', '.join(wrong)}, not float32"
    if any(pool.stride(-1) != 1 for pool in pools):
        return "channels of a pool are not side by side"
    return cannot() or unavailable("kda_fold")


@kda_commit.impl("native", objection=commit_objection, note=NOTE)
def commit_native(
    state: Tensor,
    window: Tensor,
    rec_u: Tensor,
    rec_k: Tensor,
    rec_g: Tensor,
    rec_x: Tensor,
    slots: Tensor,
    accepted: Tensor,
    into: Tensor,
) -> None:
    """As the meaning."""
    if left_to_meaning("kda_fold"):
        return kda_commit.meaning(state, window, rec_u, rec_k, rec_g, rec_x, slots, accepted, into)
    moves = moves_of(slots, accepted, into, rec_u.shape[-3])
    if not moves:
        return
    pools = state, window, rec_u, rec_k, rec_g, rec_x
    if state.dim() == 4:  # one layer
        pools = tuple(pool.unsqueeze(0) for pool in pools)
    state, window, rec_u, rec_k, rec_g, rec_x = pools
    commit_states(state, rec_u, rec_k, rec_g, moves)
    commit_windows(window, rec_x, moves)
