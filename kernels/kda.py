"""KDA: a delta rule with a decay per key channel, over ragged rows whose state lives in slots.

    S <- S diag(exp g)      u = beta (v - S k)      S <- S + u k^T      o = S q         S is [V, K]

T token rows, R requests, H heads, K and V key and value channels, S slots; ``cu`` [R+1] bounds the rows.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from .kda_chunk import (
    BLOCK_ELEMENTS,
    CHUNK,
    SUB,
    Inputs,
    advance,
    blocks,
    borrow,
    give_back,
    local,
    read,
    scatter,
    sweep,
)
from .op import acc, acc_of, op


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
    states, heads = borrow(state, slots), state.shape[1]
    for part in blocks(begins, lengths, size, heads * state.shape[3], state):
        scatter(sweep(local(inputs, part, state.dtype), part.steps, heads, states), part, out, start)
    give_back(state, slots, states)


def one_step(
    inputs: Inputs, state: Tensor, slots: list[int], tokens: list[int], out: Tensor, start: int
) -> None:
    """One token each, without a chunk."""
    rows, wide, heads = len(slots), state.dtype, state.shape[1]
    if rows == 1:
        picked = [x[tokens[0]].to(wide) for x in inputs]  # [H, *]
    else:
        at = torch.tensor(tokens, device=state.device)
        picked = [x.index_select(0, at).to(wide).flatten(0, 1) for x in inputs]  # [R * H, *]
    q, k, v, g, beta = picked
    decay = g.exp()
    states = borrow(state, slots)
    seen = read(states, torch.stack([k, q], 1) * decay.unsqueeze(1))  # [R * H, 2, V]
    u = (v - seen[:, 0]) * beta.unsqueeze(1)
    o = torch.addcmul(seen[:, 1], u, (k * q).sum(1, keepdim=True))
    advance(states, decay, u.unsqueeze(1), k.unsqueeze(1))
    give_back(state, slots, states)
    if rows == 1:
        out[tokens[0] + start] = o
    else:
        out.index_copy_(0, at + start, o.to(out.dtype).view(rows, heads, -1))
