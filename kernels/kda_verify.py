"""KDA under speculation: verify reads the state and records, commit folds what was accepted.

    verify    S -> o of every row;   u, k, g of row i -> records [slot, i]       S is left alone
    commit    S <- S exp(g_1 + .. + g_m) + sum_i u_i (k_i exp(g_{i+1} + .. + g_m))^T      i <= m accepted

One state a request is enough for any number of drafts, and rolling back is committing fewer rows.
T token rows, R requests, H heads, K and V key and value channels, C conv channels, S slots, J records a slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from .kda import kda_samples
from .kda_chunk import SUB, Inputs, advance, apply, blocks, borrow, give_back, local, scatter
from .op import op
from .samples import Draw


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


@kda_verify.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    for args in kda_samples(dtype, ([], [1], [9, 2, 0, 5], [4, 4])):
        yield *args, *records(args)


def records(args: tuple) -> tuple[Tensor, Tensor, Tensor]:
    """Record pools of nine rows for the arguments of kda_prefill."""
    k, state = args[1], args[5]
    slots, heads, values, keys = state.shape
    rec_u = state.new_full((slots, 9, heads, values), 7.0)
    return rec_u, k.new_full((slots, 9, heads, keys), 7.0), state.new_full((slots, 9, heads, keys), 7.0)


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


@kda_verify_into.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    for args in kda_samples(dtype, ([], [2, 9])):
        v = args[2]
        yield *args, *records(args), v.new_full((len(v) + 5, *v.shape[1:]), 7.0), 3


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
    size, heads, place = -(-max(lengths) // SUB) * SUB, state.shape[1], slots.tolist()
    part = next(blocks([bounds[r] for r in rows], [lengths[r] for r in rows], size, 1, state))
    o, u = apply(local(inputs, part, state.dtype), borrow(state, [place[r] for r in rows]))
    scatter(o, part, out, start)
    u = u.view(len(rows), heads, size, -1).transpose(1, 2)  # [R, C, H, V]
    for i, r in enumerate(rows):
        tokens, slot, n = slice(bounds[r], bounds[r + 1]), place[r], lengths[r]
        rec_u[slot, :n] = u[i, :n]
        rec_k[slot, :n] = inputs.k[tokens]
        rec_g[slot, :n] = inputs.g[tokens]


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

    state [S, H, V, K], window [S, 3, C], rec_u [S, J, H, V], rec_k and rec_g [S, J, H, K], rec_x [S, J, C].
    accepted 0 leaves both alone. Raises ValueError for a negative count or one above J.
    """
    if accepted.numel() == 0:
        return
    low, high = accepted.min().item(), accepted.max().item()
    if low < 0 or high > rec_u.shape[1]:
        raise ValueError(f"accepted must lie in 0..{rec_u.shape[1]} (the recorded rows), got {low}..{high}")
    live = [(slot, count) for slot, count in zip(slots.tolist(), accepted.tolist()) if count]
    if not live:
        return
    places, device = [slot for slot, _ in live], state.device
    index, counts = torch.tensor(live, device=device).unbind(1)
    absent = (torch.arange(high, device=device) >= counts.unsqueeze(1))[..., None, None]  # [R, J, 1, 1]
    u, k, g = (r[:, :high].index_select(0, index).to(state.dtype) for r in (rec_u, rec_k, rec_g))
    u, k, g = (x.masked_fill_(absent, 0.0).transpose(1, 2).flatten(0, 1) for x in (u, k, g))  # [R * H, J, *]
    after = torch.zeros_like(g)
    after[:, :-1] = g[:, 1:].flip(1).cumsum(1).flip(1)
    states = borrow(state, places)
    advance(states, g.sum(1).exp(), u, k * after.exp_())
    give_back(state, places, states)
    for slot, count in live:
        strip = torch.cat([window[slot], rec_x[slot, :count].to(window.dtype)])
        window[slot] = strip[-3:]


@kda_commit.fake
def _(state, window, rec_u, rec_k, rec_g, rec_x, slots, accepted) -> None:
    return None


@kda_commit.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    draw, slots, heads, keys, values, rows = Draw(dtype), 6, 3, 20, 12, 5
    channels = heads * (2 * keys + values)
    for accepted in ([], [0], [5], [1, 0, 3]):
        state, window = draw.normal_acc(slots, heads, values, keys), draw.normal(slots, 3, channels)
        u, k = draw.normal_acc(slots, rows, heads, values), draw.unit(slots, rows, heads, keys)
        g, x = -5.0 * draw.fraction(slots, rows, heads, keys), draw.normal(slots, rows, channels)
        places = draw.choice(len(accepted), slots)
        yield state, window, u, k, g, x, places, torch.tensor(accepted, dtype=torch.int64)
