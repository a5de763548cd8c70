"""KDA under speculation: verify reads the state and records, commit folds what was accepted.

    verify    S -> o of every row;   u, k, g of row i -> records [slot, i]       S is left alone
    commit    S[into] <- S exp(g_1 + .. + g_m) + sum_i u_i (k_i exp(g_{i+1} + .. + g_m))^T   i <= m accepted

One state a request is enough for any number of drafts, and rolling back is committing fewer rows. ``into`` is
the slot itself, or a checkpoint's: the state at a block boundary inside the accepted rows goes there first.
T token rows, R requests, H heads, K and V key and value channels, C conv channels, S slots, N slots with
records, J records a slot, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from .kda import kda_samples
from .kda_chunk import IN_PLACE_ELEMENTS, SUB, Inputs, advance, apply, blocks, borrow, local, scatter
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

    rec_u(a!) [N, J, H, V], rec_k(b!) [N, J, H, K] and rec_g(c!) [N, J, H, K]: corrections, keys and log
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
    rec_u, rec_k, rec_g = records
    rows, lengths = rows_that_fit(bounds, rec_u.shape[1], "the records hold")
    if not rows:
        return
    place = slots.tolist()
    u = run(inputs, state, [place[r] for r in rows], [bounds[r] for r in rows], lengths, out, start)
    for i, (r, n) in enumerate(zip(rows, lengths)):
        tokens, slot = slice(bounds[r], bounds[r + 1]), place[r]
        rec_u[slot, :n] = u[i, :n]
        rec_k[slot, :n] = inputs.k[tokens]
        rec_g[slot, :n] = inputs.g[tokens]


def rows_that_fit(bounds: list[int], most: int, holder: str) -> tuple[list[int], list[int]]:
    """The rows that have tokens, and how many each. Raises ValueError for one longer than ``most``."""
    lengths = [end - begin for begin, end in pairwise(bounds)]
    if max(lengths, default=0) > most:
        raise ValueError(f"a verify row has {max(lengths)} tokens, {holder} {most}")
    rows = [r for r, n in enumerate(lengths) if n]
    return rows, [lengths[r] for r in rows]


def run(
    inputs: Inputs,
    state: Tensor,
    slots: list[int],
    begins: list[int],
    lengths: list[int],
    out: Tensor,
    start: int,
) -> Tensor:
    """Rows as one chunk each that reads its state: outputs to ``out``, corrections u [R, C, H, V] back."""
    size = -(-max(lengths) // SUB) * SUB
    part = next(blocks(begins, lengths, size, 1, state))
    o, u = apply(local(inputs, part, state.dtype), borrow(state, slots))
    scatter(o, part, out, start)
    return u.view(len(slots), state.shape[1], size, -1).transpose(1, 2)


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
    into: Tensor,
) -> None:
    """State and window of ``slots`` [R] after the first ``accepted`` [R] recorded rows -> slots ``into`` [R].

    state(a!) [S, H, V, K], window(b!) [S, 3, C], rec_u [N, J, H, V], rec_k and rec_g [N, J, H, K],
    rec_x [N, J, C]; or all of them with the layers of a model in front, [L, S, ..] and [L, N, ..]. into equal
    to slots advances in place. accepted 0 copies, or leaves alone what is in place. A slot may stand in two
    rows: its state at a block boundary to a checkpoint, and the rest in place. Raises ValueError, before
    anything is written, for a count outside 0..J, an ``into`` twice, and one that is another row's slot.
    """
    moves = moves_of(slots, accepted, into, rec_u.shape[-3])
    if not moves:
        return
    pools = (state, window, rec_u, rec_k, rec_g, rec_x)
    if state.dim() == 4:  # one layer
        pools = tuple(pool.unsqueeze(0) for pool in pools)
    layers, large = len(pools[0]), pools[0][0, 0].numel() >= IN_PLACE_ELEMENTS
    together = 1 if large else layers  # records of all layers of a large model are large
    for at in range(0, layers, together):
        commit(*(pool[at : at + together] for pool in pools), moves)


def commit(
    state: Tensor,
    window: Tensor,
    rec_u: Tensor,
    rec_k: Tensor,
    rec_g: Tensor,
    rec_x: Tensor,
    moves: list[tuple[int, int, int]],
) -> None:
    """kda_commit over [L, ..] pools, for moves (slot, count, into) that were checked."""
    index, counts, places = torch.tensor(moves, device=state.device).unbind(1)
    high = max(count for _, count, _ in moves)
    absent = (torch.arange(high, device=state.device) >= counts.unsqueeze(1))[..., None, None]  # [R, J, 1, 1]
    u, k, g = (r[:, :, :high].index_select(1, index).to(state.dtype) for r in (rec_u, rec_k, rec_g))
    u, k, g = (x.masked_fill_(absent, 0.0).transpose(2, 3).flatten(0, 2) for x in (u, k, g))  # [LRH, J, *]
    after = torch.zeros_like(g)
    after[:, :-1] = g[:, 1:].flip(1).cumsum(1).flip(1)
    if state[0, 0].numel() >= IN_PLACE_ELEMENTS:
        for slot, _, place in moves:
            if place != slot:
                state[:, place] = state[:, slot]
        states = [layer[place] for layer in state for _, _, place in moves]
        advance(states, g.sum(1).exp(), u, k * after.exp_())
    else:
        some = state.index_select(1, index)
        advance([some.flatten(0, 2)], g.sum(1).exp(), u, k * after.exp_())
        state.index_copy_(1, places, some)
    commit_windows(window, rec_x, moves)


def commit_windows(window: Tensor, rec_x: Tensor, moves: list[tuple[int, int, int]]) -> None:
    """The last three raw rows of each, window(a!) [L, S, 3, C], from those before and rec_x [L, N, J, C]."""
    index, counts, places = torch.tensor(moves, device=window.device).unbind(1)
    high = max(count for _, count, _ in moves)
    fresh = rec_x[:, :, :high].index_select(1, index).to(window.dtype)
    strip = torch.cat([window.index_select(1, index), fresh], 2)  # [L, R, 3 + J, C]
    last = counts.unsqueeze(1) + torch.arange(3, device=window.device)
    rows = torch.arange(len(moves), device=window.device).unsqueeze(1)
    window.index_copy_(1, places, strip[:, rows, last])


def moves_of(slots: Tensor, accepted: Tensor, into: Tensor, most: int) -> list[tuple[int, int, int]]:
    """(slot, count, into) of the rows that change anything; see :func:`kda_commit` for what is refused."""
    rows = list(zip(slots.tolist(), accepted.tolist(), into.tolist(), strict=True))
    low, high = (f((count for _, count, _ in rows), default=0) for f in (min, max))
    if low < 0 or high > most:
        raise ValueError(f"accepted must lie in 0..{most} (the recorded rows), got {low}..{high}")
    moves = [row for row in rows if row[1] or row[2] != row[0]]
    homes, places = {slot for slot, _, _ in rows}, {place for _, _, place in moves}
    if len(places) < len(moves) or any(place != slot and place in homes for slot, _, place in moves):
        raise ValueError(
            f"into {into.tolist()} for slots {slots.tolist()}: a row may write its own slot or one that no "
            "other row has or writes"
        )
    return moves


@kda_commit.fake
def _(state, window, rec_u, rec_k, rec_g, rec_x, slots, accepted, into) -> None:
    return None


@kda_commit.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    draw, slots, heads, keys, values, rows = Draw(dtype), 8, 3, 20, 12, 5
    channels = heads * (2 * keys + values)
    cases = (([], 0, ()), ([0], 0, ()), ([5], 3, ()), ([1, 0, 3], 0, ()), ([2, 0], 4, (2,)))
    for accepted, shift, layers in cases:
        state = draw.normal_acc(*layers, slots, heads, values, keys)
        window = draw.normal(*layers, slots, 3, channels)
        shape = (*layers, slots - 3, rows)  # the last slots have no records
        u, k = draw.normal_acc(*shape, heads, values), draw.unit(*shape, heads, keys)
        g, x = -5.0 * draw.fraction(*shape, heads, keys), draw.normal(*shape, channels)
        places = draw.choice(len(accepted), slots - 4)
        yield state, window, u, k, g, x, places, torch.tensor(accepted, dtype=torch.int64), places + shift
