"""KDA: a delta rule with a decay per key channel, over ragged rows whose state lives in slots.

    S <- S diag(exp g)      u = beta (v - S k)      S <- S + u k^T      o = S q         S is [V, K]

T token rows, R requests, H heads, K and V key and value channels, S slots; ``cu`` [R+1] bounds the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from .kda_chunk import (
    BLOCK_ELEMENTS,
    CHUNK,
    SUB,
    BeforeChunk,
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
from .samples import Draw, gapped, packed_heads, row_bounds

Step = Callable[[Inputs, Tensor, list[int], list[int], Tensor | None, int], None]


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


@kda_decay.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    draw = Draw(dtype)
    for tokens, bound in ((0, -5.0), (1, -5.0), (9, -5.0), (9, 0.0)):
        yield draw.normal(tokens, 3, 8) * 3, draw.normal_acc(3), draw.normal_acc(24), bound
    yield draw.normal(4, 64)[:, 8:32].view(4, 3, 8), draw.normal_acc(3), draw.normal_acc(24), -5.0


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


@kda_prefill.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    yield from kda_samples(dtype, ([], [0], [1], [1, 1, 1], [5, 0, 1, 70, 2, 16], [130, 64], [17]))


def kda_samples(dtype: torch.dtype, lengths: tuple[list[int], ...]) -> Iterator[tuple]:
    """Arguments of kda_prefill; every second one is cut from packed rows and has gaps in its pool."""
    draw, slots, heads, keys, values = Draw(dtype), 8, 3, 20, 12
    for i, rows in enumerate(lengths):
        tokens = sum(rows)
        q, k = draw.unit(tokens, heads, keys) * keys**-0.5, draw.unit(tokens, heads, keys)
        v, beta = draw.normal(tokens, heads, values), draw.fraction(tokens, heads)
        g = -(5.0 if i % 3 else 30.0) * draw.fraction(tokens, heads, keys) ** 2
        state = draw.normal_acc(slots, heads, values, keys)
        if i % 2:
            (q, k, v), state = packed_heads([q, k, v]), gapped(state)
        yield q, k, v, g, beta, state, draw.choice(len(rows), slots), row_bounds(rows)


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


@kda_prefill_into.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    for args in kda_samples(dtype, ([], [1], [3, 1, 40])):
        v = args[2]
        yield *args, v.new_full((len(v) + 5, *v.shape[1:]), 7.0), 2


def forward(
    inputs: Inputs,
    state: Tensor,
    slots: Tensor,
    bounds: list[int],
    out: Tensor,
    start: int,
    watch: Callable[[list[int]], BeforeChunk] | None = None,
    step: Step | None = None,
) -> None:
    """All rows, grouped by length: one step, one sub-chunk, whole chunks.

    watch(rows): what to call before each chunk of those rows, of two tokens or more, longest first.
    step: what does the rows of one token, called like :func:`one_step`, which is the default.
    """
    lengths = [end - begin for begin, end in pairwise(bounds)]
    by_length = sorted(range(len(lengths)), key=lambda r: -lengths[r])
    place = slots.tolist()
    singles = [r for r in by_length if lengths[r] == 1]
    if singles:
        step = step or one_step
        step(inputs, state, [place[r] for r in singles], [bounds[r] for r in singles], out, start)
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
                watch(some) if watch else None,
            )


def whole_rows(
    inputs: Inputs,
    state: Tensor,
    slots: list[int],
    begins: list[int],
    lengths: list[int],
    size: int,
    out: Tensor | None,
    start: int,
    watch: BeforeChunk | None = None,
) -> None:
    """Rows of several tokens, longest first, in chunks of ``size``; ``out`` None when only states matter."""
    states, heads = borrow(state, slots), state.shape[1]
    for part in blocks(begins, lengths, size, heads * state.shape[3], state):
        o = sweep(local(inputs, part, state.dtype), part.steps, heads, states, watch)
        if out is not None:
            scatter(o, part, out, start)
    give_back(state, slots, states)


def one_step(
    inputs: Inputs, state: Tensor, slots: list[int], tokens: list[int], out: Tensor | None, start: int
) -> None:
    """One token each, without a chunk; ``out`` None when only the states matter."""
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
    if out is None:
        return
    if rows == 1:
        out[tokens[0] + start] = o
    else:
        out.index_copy_(0, at + start, o.to(out.dtype).view(rows, heads, -1))
