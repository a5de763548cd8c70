"""KDA: a delta rule with a decay per key channel, over ragged rows whose state lives in slots.

    S <- S diag(exp g)      u = beta (v - S k)      S <- S + u k^T      o = S q         S is [V, K]

    kda_prefill    reads and writes the state of each row
    kda_verify     reads it, and records u, k and g of every row     [S, J, H, *], by slot
    kda_commit     folds the accepted prefix of the records into the state and the conv window

T token rows, R requests, H heads, K and V key and value channels, S slots, J records a slot.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn import functional as F

from .conv import positions
from .kda_chunk import CHUNK, SUB, Inputs, blocks, local, sweep
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
    lengths = [end - begin for begin, end in itertools.pairwise(bounds)]
    single = [r for r, n in enumerate(lengths) if n == 1]
    if single:
        one_step(inputs, state, slots, [bounds[r] for r in single], single, out, start)
    short = [r for r, n in enumerate(lengths) if 1 < n <= SUB]
    long = sorted((r for r, n in enumerate(lengths) if n > SUB), key=lambda r: -lengths[r])
    for rows, size in ((short, SUB), (long, CHUNK)):
        if not rows:
            continue
        index = slots[torch.tensor(rows)]
        carried = state[index].flatten(0, 1)  # [R * H, V, K]
        for block in blocks([bounds[r] for r in rows], [lengths[r] for r in rows], size, inputs.k[0].numel()):
            o, _ = sweep(local(inputs, block, state.dtype), block.steps, state.shape[1], carried)
            scatter(o, block, out, start)
        state[index] = carried.view(len(rows), *state.shape[1:])


def scatter(o: Tensor, block, out: Tensor, start: int) -> None:
    """o [M * H, C, V] to the token rows of the block."""
    rows = o.unflatten(0, (-1, out.shape[1])).transpose(1, 2).flatten(0, 1).to(out.dtype)  # [M * C, H, V]
    tokens = block.tokens.flatten()
    if block.valid is not None:
        keep = block.valid.flatten()
        rows, tokens = rows[keep], tokens[keep]
    out[tokens + start] = rows


def one_step(
    inputs: Inputs, state: Tensor, slots: Tensor, tokens: list[int], rows: list[int], out: Tensor, start: int
) -> None:
    """One token for each of ``rows``."""
    q, k, v, g, beta = (x[torch.tensor(tokens)].to(state.dtype) for x in inputs)
    index = slots[torch.tensor(rows)]
    s = state[index] * g.exp().unsqueeze(2)  # [R, H, V, K]
    u = beta.unsqueeze(-1) * (v - torch.einsum("rhvk,rhk->rhv", s, k))
    s = s + u.unsqueeze(-1) * k.unsqueeze(2)
    out[torch.tensor(tokens) + start] = torch.einsum("rhvk,rhk->rhv", s, q).to(out.dtype)
    state[index] = s


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
    lengths = [end - begin for begin, end in itertools.pairwise(bounds)]
    if not lengths or max(lengths) == 0:
        return
    rec_u, rec_k, rec_g = records
    if max(lengths) > rec_u.shape[1]:
        raise ValueError(f"a verify row has {max(lengths)} tokens, the records hold {rec_u.shape[1]}")
    rows = [r for r, n in enumerate(lengths) if n]
    size = -(-max(lengths) // SUB) * SUB
    index = slots[torch.tensor(rows)]
    carried = state[index].flatten(0, 1)
    block = next(blocks([bounds[r] for r in rows], [lengths[r] for r in rows], size, 1))
    o, u = sweep(local(inputs, block, state.dtype), block.steps, state.shape[1], carried)
    scatter(o, block, out, start)
    row, at = positions(bounds)
    u = u.unflatten(0, (-1, state.shape[1])).transpose(1, 2)  # [R, C, H, V]
    keep = torch.ones(len(rows), size, dtype=torch.bool) if block.valid is None else block.valid
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
