"""KDA over whole rows in Triton: the states carried from chunk to chunk, and what calls all of it.

    kda_chunk_triton                 P, W = solved, U = corrections, q exp G = reads, k exp(G_C - G) = ends
    program (row, head, block of V)  O = (q exp G) S^T + P (U - W S^T), S <- S exp(G_C) + U^T ends, next chunk
    a checkpoint on the grid         S on its way, copied
    program (row, head, K and V)     one off the grid: the same step again, cut, from the copy at its chunk

Loops over the halves of K are loops so that one tile is in registers at a time. T token rows, R requests, H
heads, K and V channels of a head, S slots, N export entries; KP and VP are K and V, padded.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .jit_triton import blocks, jit, launch, on_amd, power_of_two, tl
from .kda_chunk_triton import ends_of, scores_kernel, solve_kernel

CHUNK = 64
COLUMNS = 64  # of K or V that scores are summed over at a time
SCORE_WARPS = 8
SOLVED, SOLVE_WARPS = 64, 8  # columns of K or V that a program solves, but on AMD:
SOLVED_AMD, SOLVE_WARPS_AMD = 32, 4
VALUES = 16  # of the state that a program carries; with 32 its operands spill on Hopper
HALF = 64  # key channels of the state in one piece; a head has one or two


@jit
def export_of(export_offset, export_slot, row, N, count, slot, S):
    """(offset, slot) of a row's checkpoint; offset 0 for none, and for one that may not be."""
    offset = tl.load(export_offset + row, mask=row < N, other=0)
    place = tl.load(export_slot + row, mask=row < N, other=0).to(tl.int64)
    right = (offset > 0) & (offset <= count) & (place >= 0) & (place < S) & (place != slot)
    return tl.where(right, offset, 0), place


@jit
def half_of(x, live, s, sums, KP: tl.constexpr, BK: tl.constexpr, half, PRECISION: tl.constexpr):  # fmt: skip
    """sums + x[:, a half of K] s, of a chunk x [64, KP]."""
    at = tl.arange(0, 64)[:, None] * KP + half * BK + tl.arange(0, BK)[None, :]
    return tl.dot(tl.load(x + at, mask=live, other=0.0), s, sums, input_precision=PRECISION)


@jit
def moved_on(
    ends, decay, live, u, s, KP: tl.constexpr, BK: tl.constexpr, half, PRECISION: tl.constexpr
):  # fmt: skip
    """A half of the state [BK, BV] at the end of the chunk."""
    col = half * BK + tl.arange(0, BK)
    keys = tl.load(ends + tl.arange(0, 64)[:, None] * KP + col[None, :], mask=live, other=0.0)
    # a sum that started from the state would round each product as coarsely as the state is
    moved = tl.dot(tl.trans(keys), u, input_precision=PRECISION)
    return tl.fma(s, tl.broadcast_to(tl.load(decay + col)[:, None], s.shape), moved)


@jit
def leave(state, low, high, held, more, BK: tl.constexpr, KP: tl.constexpr, value, state_row):
    """The state of a head, K low and high, to where ``state`` points."""
    at = state + value[None, :] * state_row + tl.arange(0, BK)[:, None]
    tl.store(at, low, mask=held)
    if BK < KP:
        tl.store(at + BK, high, mask=more)


@jit
def sweep_kernel(
    cu, slots, state, out, weights, reads, solved, corrections, ends, decay, export_offset, export_slot,
    state_slot, state_head, state_row, out_row, out_head, T, H, K, V, S, N,
    EXPORT: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The state [K, BV] is carried in one piece or in two halves of K, low and high, of BK channels."""
    row, head, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    begin, end = tl.load(cu + row).to(tl.int64), tl.load(cu + row + 1)
    slot, count = tl.load(slots + row).to(tl.int64), (end - begin).to(tl.int32)
    key, value, near = tl.arange(0, BK), part * BV + tl.arange(0, BV), tl.arange(0, 64)
    inside, some = (value < V)[None, :], count > 0
    held, more = (key < K)[:, None] & inside, (key + BK < K)[:, None] & inside
    home, at = state + slot * state_slot + head * state_head, head * T + begin
    low = tl.load(home + value[None, :] * state_row + key[:, None], mask=held & some, other=0.0)
    high = low
    if BK < KP:
        high = tl.load(home + value[None, :] * state_row + key[:, None] + BK, mask=more & some, other=0.0)
    out, decay = out + begin * out_row + head * out_head, decay + ((begin // 64 + row) * H + head) * KP
    if EXPORT:
        offset, place = export_of(export_offset, export_slot, row, N, count, slot, S)
        away = state + place * state_slot + head * state_head
    for number in range(tl.cdiv(count, 64)):
        if EXPORT:
            reached = number == offset // 64
            if reached & (offset > 0):
                leave(away, low, high, held, more, BK, KP, value, state_row)
        live = (near < count - 64 * number)[:, None]
        here = corrections + at * VP + near[:, None] * VP + value[None, :]
        u = tl.load(here, mask=live, other=0.0)
        seen, o = tl.zeros((64, BV), tl.float32), tl.zeros((64, BV), tl.float32)
        for half in range(tl.cdiv(K, BK)):
            s = tl.where(half == 0, low, high)
            seen = half_of(solved + at * KP, live, s, seen, KP, BK, half, PRECISION)
        u -= seen
        for half in range(tl.cdiv(K, BK)):
            s = tl.where(half == 0, low, high)
            o = half_of(reads + at * KP, live, s, o, KP, BK, half, PRECISION)
        o = half_of(weights + at * 64, live, u, o, 64, 64, 0, PRECISION)
        put = out + near[:, None] * out_row + value[None, :]
        tl.store(put, o.to(out.dtype.element_ty), mask=live & inside)
        if EXPORT:  # what rest_kernel goes on from
            tl.store(here, u, mask=live & reached)
        for half in range(tl.cdiv(K, BK)):
            s = tl.where(half == 0, low, high)
            s = moved_on(ends + at * KP, decay, live, u, s, KP, BK, half, PRECISION)
            low, high = tl.where(half == 0, s, low), tl.where(half == 0, high, s)
        at, out, decay = at + 64, out + 64 * out_row, decay + H * KP
    if some:
        leave(home, low, high, held, more, BK, KP, value, state_row)
    if EXPORT:
        ends_there = (offset > 0) & (offset == count)
        if ends_there:
            leave(away, low, high, held, more, BK, KP, value, state_row)


@jit
def rest_kernel(
    k, g, cu, slots, state, corrections, export_offset, export_slot,
    k_row, k_head, g_row, g_head, state_slot, state_head, state_row, T, K, V, S, N,
    KP: tl.constexpr, VP: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A checkpoint off the chunk grid, from the chunk's start where the sweep left it."""
    row, head, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    begin, end = tl.load(cu + row).to(tl.int64), tl.load(cu + row + 1)
    slot, count = tl.load(slots + row).to(tl.int64), (end - begin).to(tl.int32)
    offset, place = export_of(export_offset, export_slot, row, N, count, slot, S)
    stop = offset % 64
    if (stop > 0) & (offset < count):
        begin += offset // 64 * 64
        col, value = part % (KP // BK) * BK + tl.arange(0, BK), part // (KP // BK) * BV + tl.arange(0, BV)
        keys, whole = ends_of(
            k + begin * k_row + head * k_head, g + begin * g_row + head * g_head, k_row, g_row, stop, col,
            col < K,
        )  # fmt: skip
        near = tl.arange(0, 64)
        at = corrections + (head * T + begin) * VP + near[:, None] * VP + value[None, :]
        u = tl.load(at, mask=(near < stop)[:, None], other=0.0)
        away = state + place * state_slot + head * state_head
        at = away + value[None, :] * state_row + col[:, None]
        held = (col < K)[:, None] & (value < V)[None, :]
        s, moved = tl.load(at, mask=held, other=0.0), tl.dot(tl.trans(keys), u, input_precision=PRECISION)
        tl.store(at, tl.fma(s, tl.broadcast_to(whole[:, None], s.shape), moved), mask=held)


class Places(NamedTuple):
    """Where rows live and which leave a checkpoint: slots [R], cu [R+1], export columns [N] or None."""

    slots: Tensor
    cu: Tensor
    export_offset: Tensor | None = None
    export_slot: Tensor | None = None


def run(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, places: Places, out: Tensor,
    zero: bool,
) -> None:  # fmt: skip
    """All rows to ``out`` [T2, H, V], whose row 0 is token row 0; zero: token rows past cu[-1] as well."""
    (tokens, heads, keys), values, requests = q.shape, v.shape[2], places.slots.shape[0]
    wide, high = max(16, power_of_two(keys)), max(16, power_of_two(values))
    half, carried = min(HALF, wide), min(VALUES, high)
    solved_by, solve_warps = (SOLVED_AMD, SOLVE_WARPS_AMD) if on_amd() else (SOLVED, SOLVE_WARPS)
    columns = min(solved_by, wide, high)
    count = tokens // CHUNK + requests + 1  # one more, for token rows of nobody
    weights, lower = (state.new_empty(heads, tokens, CHUNK) for _ in range(2))
    reads, solved, ends = (state.new_empty(heads, tokens, wide) for _ in range(3))
    corrections, decay = state.new_empty(heads, tokens, high), state.new_empty(count, heads, wide)
    q_at, k_at, v_at, g_at, beta_at, out_at = (x.stride()[:2] for x in (q, k, v, g, beta, out))
    shared = {"KP": wide, "VP": high, "PRECISION": "ieee" if on_amd() else "tf32x3"}
    launch(
        scores_kernel, (count, heads, CHUNK // 16), q, k, g, beta, places.cu, out, weights, lower,
        *q_at, *k_at, *g_at, *beta_at, *out_at, tokens, requests, keys, values,
        ZERO=zero, STEPS=requests.bit_length(), BK=min(COLUMNS, wide), num_warps=SCORE_WARPS, **shared,
    )  # fmt: skip
    launch(
        solve_kernel, (count, heads, (wide + high) // columns),
        q, k, v, g, beta, places.cu, lower, reads, solved, corrections, ends, decay,
        *q_at, *k_at, *v_at, *g_at, *beta_at, tokens, requests, heads, keys, values,
        STEPS=requests.bit_length(), BN=columns, num_warps=solve_warps, **shared,
    )  # fmt: skip
    exports, offset, place = places.export_offset is not None, places.export_offset, places.export_slot
    sizes = (keys, values, state.shape[0], offset.shape[0] if exports else 0)
    launch(
        sweep_kernel, (requests, heads, blocks(high, carried)),
        places.cu, places.slots, state, out, weights, reads, solved, corrections, ends, decay, offset, place,
        *state.stride()[:3], *out_at, tokens, heads, *sizes,
        EXPORT=exports, BK=half, BV=carried, **shared,
    )  # fmt: skip
    if exports:
        launch(
            rest_kernel, (requests, heads, blocks(wide, half) * blocks(high, carried)),
            k, g, places.cu, places.slots, state, corrections, offset, place,
            *k_at, *g_at, *state.stride()[:3], tokens, *sizes, BK=half, BV=carried, **shared,
        )  # fmt: skip
