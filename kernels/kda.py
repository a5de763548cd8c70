"""KDA: a delta rule with a decay per key channel, over ragged rows whose state lives in slots.

    S <- S diag(exp g)      u = beta (v - S k)      S <- S + u k^T      o = S q         S is [V, K]

    kda_prefill    reads and writes the state of each row
    kda_verify     reads it, and records u, k and g of every row     [S, J, H, *], by slot
    kda_commit     folds the accepted prefix of the records into the state and the conv window

T token rows, R requests, H heads, K and V key and value channels, S slots, J records a slot.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from .conv import positions
from .kda_chunk import BLOCK_ELEMENTS, CHUNK, SUB, Block, Inputs, blocks, local, sweep
from .op import acc, acc_of, op

IN_PLACE_ELEMENTS = 1 << 14  # from this size of a state on, a copy costs more than separate calls


@op()
def kda_decay(f: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """Log decay.  f [T, H, K], a_log [H] acc, dt_bias [H*K] acc -> g [T, H, K] acc.

    lower_bound sigmoid(exp(a_log) (f + dt_bias)), between lower_bound and 0. lower_bound 0.0 is the
    unbounded form of Kimi-Linear, -exp(a_log) softplus(f + dt_bias).
    """
    shifted = acc_of(f) + dt_bias.view(f.shape[1], f.shape[2])
    rate = torch.exp(a_log).unsqueeze(-1)
    if lower_bound == 0.0:
        return (-rate * F.softplus(shifted, threshold=50.0)).contiguous()
    return (lower_bound * torch.sigmoid(rate * shifted)).contiguous()


@kda_decay.fake
def _(f: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    return f.new_empty(f.shape, dtype=acc(f.dtype))


@op(writes=("state",), opaque=True)
def kda_prefill(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, slots: Tensor, cu: Tensor
) -> Tensor:
    """Run every row from its state and leave the state behind.  -> o [T, H, V] in v's dtype.

    q, k [T, H, K] normalised and q scaled, v [T, H, V], g [T, H, K] acc, beta [T, H] acc,
    state(a!) [S, H, V, K] acc, slots [R], cu [R+1]. Rows of length 1 take the one-step path, rows of
    length 0 leave their state alone. Token rows past cu[-1] are not read and come back zero.
    """
    out = v.new_zeros(v.shape)
    forward(Inputs(q, k, v, g, beta), state, slots, cu.tolist(), out, 0)
    return out


@kda_prefill.fake
def _(q, k, v, g, beta, state, slots, cu) -> Tensor:
    return v.new_empty(v.shape)


@op(writes=("state", "out"), opaque=True)
def kda_prefill_into(
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
    """kda_prefill, with the results written to rows [start, start + cu[-1]) of out(b!) [T2, H, V]."""
    forward(Inputs(q, k, v, g, beta), state, slots, cu.tolist(), out, start)


@kda_prefill_into.fake
def _(q, k, v, g, beta, state, slots, cu, out, start) -> None:
    return None


def forward(inputs: Inputs, state: Tensor, slots: Tensor, bounds: list[int], out: Tensor, start: int) -> None:
    """All rows, grouped by length: one step, one sub-chunk, whole chunks."""
    lengths = [end - begin for begin, end in pairwise(bounds)]
    by_length = sorted(range(len(lengths)), key=lambda r: -lengths[r])
    place = slots.tolist()
    singles = [r for r in by_length if lengths[r] == 1]
    if singles:
        one_step(inputs, state, [place[r] for r in singles], [bounds[r] for r in singles], out, start)
    width = state.shape[1] * state.shape[3]
    for least, most, size in ((SUB + 1, bounds[-1], CHUNK), (2, SUB, SUB)):
        rows = [r for r in by_length if least <= lengths[r] <= most]
        together = max(1, BLOCK_ELEMENTS // (size * width))
        for at in range(0, len(rows), together):
            some = rows[at : at + together]
            whole_rows(
                inputs,
                state,
                [place[r] for r in some],
                [bounds[r] for r in some],
                [lengths[r] for r in some],
                size,
                out,
                start,
            )


def whole_rows(
    inputs: Inputs,
    state: Tensor,
    slots: list[int],
    begins: list[int],
    lengths: list[int],
    size: int,
    out: Tensor,
    start: int,
) -> None:
    """Rows of several tokens, longest first, in chunks of ``size``."""
    carried = take(state, slots)
    for part in blocks(begins, lengths, size, state.shape[1] * state.shape[3], state):
        o, _ = sweep(local(inputs, part, state.dtype), part.steps, state.shape[1], carried, update=True)
        scatter(o, part, out, start)
    give(state, slots, carried)


def take(state: Tensor, slots: list[int]) -> Tensor:
    """The states of ``slots`` as [R * H, V, K]: a view of the pool for one slot, else a copy."""
    if len(slots) == 1:
        return state[slots[0]]
    return state.index_select(0, torch.tensor(slots, device=state.device)).flatten(0, 1)


def give(state: Tensor, slots: list[int], carried: Tensor) -> None:
    """Put what ``take`` copied back."""
    if len(slots) > 1:
        for slot, new in zip(slots, carried.unflatten(0, (len(slots), -1))):
            state[slot].copy_(new)


def scatter(o: Tensor, block: Block, out: Tensor, start: int) -> None:
    """o [M * H, C, V] to the token rows of the block."""
    rows = o.unflatten(0, (-1, out.shape[1])).transpose(1, 2).to(out.dtype).flatten(0, 1)  # [M * C, H, V]
    tokens = block.tokens.flatten()
    if block.valid is not None:
        keep = block.valid.flatten().nonzero().flatten()
        rows, tokens = rows.index_select(0, keep), tokens.index_select(0, keep)
    out.index_copy_(0, tokens + start, rows)


def one_step(
    inputs: Inputs, state: Tensor, slots: list[int], tokens: list[int], out: Tensor, start: int
) -> None:
    """One token each. Large states are advanced in their slots, small ones together in a copy."""
    count, heads = len(slots), state.shape[1]
    at = torch.tensor(tokens, device=state.device)
    q, k, v, g, beta = (x.index_select(0, at).to(state.dtype).flatten(0, 1) for x in inputs)  # [R * H, *]
    decay = g.exp_()
    reads = torch.stack([k, q], 1) * decay.unsqueeze(1)  # [R * H, 2, K]
    if state[0].numel() >= IN_PLACE_ELEMENTS:
        parts = [state[slot] for slot in slots]
    else:
        parts = [take(state, slots)]
    split = len(parts[0])
    seen = torch.empty(count * heads, 2, v.shape[1], dtype=state.dtype, device=state.device)
    for part, read, into in zip(parts, reads.split(split), seen.split(split)):
        torch.bmm(read, part.mT, out=into)
    u = (v - seen[:, 0]).mul_(beta.unsqueeze(1))
    o = torch.addcmul(seen[:, 1], u, (k * q).sum(1, keepdim=True))
    for part, fade, rise, key in zip(parts, decay.split(split), u.split(split), k.split(split)):
        part.mul_(fade.unsqueeze(1)).addcmul_(rise.unsqueeze(2), key.unsqueeze(1))
    if len(parts) == 1:
        give(state, slots, parts[0])
    out.index_copy_(0, at + start, o.to(out.dtype).unflatten(0, (count, heads)))


@op(writes=("rec_u", "rec_k", "rec_g"), opaque=True)
def kda_verify(
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
    """The outputs of kda_prefill with the state only read; what a commit needs goes to the records.

    rec_u(a!) [S, J, H, V], rec_k(b!) [S, J, H, K] and rec_g(c!) [S, J, H, K]: corrections, keys and log
    decays by slot. Raises ValueError when a row is longer than J.
    """
    out = v.new_zeros(v.shape)
    verify(Inputs(q, k, v, g, beta), state, slots, cu.tolist(), (rec_u, rec_k, rec_g), out, 0)
    return out


@kda_verify.fake
def _(q, k, v, g, beta, state, slots, cu, rec_u, rec_k, rec_g) -> Tensor:
    return v.new_empty(v.shape)


@op(writes=("rec_u", "rec_k", "rec_g", "out"), opaque=True)
def kda_verify_into(
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
    """kda_verify, with the results written to rows [start, start + cu[-1]) of out(d!) [T2, H, V]."""
    verify(Inputs(q, k, v, g, beta), state, slots, cu.tolist(), (rec_u, rec_k, rec_g), out, start)


@kda_verify_into.fake
def _(q, k, v, g, beta, state, slots, cu, rec_u, rec_k, rec_g, out, start) -> None:
    return None


def verify(
    inputs: Inputs,
    state: Tensor,
    slots: Tensor,
    bounds: list[int],
    records: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    start: int,
) -> None:
    """Every row as one chunk that reads its state; u, k and g go to ``records``."""
    lengths = [end - begin for begin, end in pairwise(bounds)]
    if not lengths or max(lengths) == 0:
        return
    rec_u, rec_k, rec_g = records
    if max(lengths) > rec_u.shape[1]:
        raise ValueError(f"a verify row has {max(lengths)} tokens, the records hold {rec_u.shape[1]}")
    rows = [r for r, n in enumerate(lengths) if n]
    size = -(-max(lengths) // SUB) * SUB
    carried = state.index_select(0, slots[torch.tensor(rows)]).flatten(0, 1)
    part = next(blocks([bounds[r] for r in rows], [lengths[r] for r in rows], size, 1, state))
    o, u = sweep(local(inputs, part, state.dtype), part.steps, state.shape[1], carried, update=False)
    scatter(o, part, out, start)
    row, at = positions(bounds)
    u = u.unflatten(0, (-1, state.shape[1])).transpose(1, 2)  # [R, C, H, V]
    keep = torch.ones(len(rows), size, dtype=torch.bool) if part.valid is None else part.valid
    rec_u[slots[row], at] = u[keep].to(rec_u.dtype)
    rec_k[slots[row], at] = inputs.k[: bounds[-1]].to(rec_k.dtype)
    rec_g[slots[row], at] = inputs.g[: bounds[-1]].to(rec_g.dtype)


@op(writes=("state", "window"), opaque=True)
def kda_commit(
    state: Tensor,
    window: Tensor,
    rec_u: Tensor,
    rec_k: Tensor,
    rec_g: Tensor,
    rec_x: Tensor,
    slots: Tensor,
    accepted: Tensor,
) -> None:
    """Advance state(a!) and window(b!) of ``slots`` [Rv] by the first ``accepted`` [Rv] recorded rows.

        S <- S exp(g_1 + .. + g_m) + sum_i u_i (k_i exp(g_{i+1} + .. + g_m))^T

    accepted 0 leaves both alone. Raises ValueError for a negative count or one above J.
    """
    if accepted.numel() == 0:
        return
    low, high = accepted.min().item(), accepted.max().item()
    if low < 0 or high > rec_u.shape[1]:
        raise ValueError(f"accepted must lie in 0..{rec_u.shape[1]} (the recorded rows), got {low}..{high}")
    if low == 0:
        live = accepted.nonzero().flatten()
        slots, accepted = slots[live], accepted[live]
    if high == 0:
        return
    kept = torch.arange(high) < accepted.unsqueeze(1)  # [R, J]
    hide = ~kept[..., None, None]
    wide = state.dtype
    g = rec_g[slots, :high].to(wide).masked_fill(hide, 0.0)
    u, k = (r[slots, :high].to(wide).masked_fill(hide, 0.0) for r in (rec_u, rec_k))
    after = torch.zeros_like(g)
    after[:, :-1] = g[:, 1:].flip(1).cumsum(1).flip(1)
    added = torch.einsum("rjhv,rjhk->rhvk", u, k * after.exp())
    state[slots] = state[slots] * g.sum(1).exp().unsqueeze(2) + added
    strip = torch.cat([window[slots], rec_x[slots].to(window.dtype)], 1)
    last = accepted.long().unsqueeze(1) + torch.arange(3)
    window[slots] = strip[torch.arange(len(slots)).unsqueeze(1), last]


@kda_commit.fake
def _(state, window, rec_u, rec_k, rec_g, rec_x, slots, accepted) -> None:
    return None
