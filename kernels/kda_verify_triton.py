"""KDA under speculation in Triton: drafts run token by token on a state in registers; a commit folds records.

    program (row, head, block of V)   S, read once -> o and u of each token; k and g are recorded as they are
    program (row, layer and head, V)  its records, one by one, on a state that leaves for its place once
    program (row, layer, channels)    window[into] <- three raw rows that end at the last accepted one

A slot may be committed twice, to a checkpoint and in place, and who writes in place must not do so while the
other still reads: rows that go elsewhere are one launch, those in place the next.
T token rows, R requests, H heads, K and V channels of a head, S slots, J records a slot, L layers.
"""

import torch
from torch import Tensor

from .jit_triton import blocks, first_objection, jit, launch, no_gpu, not_rows, power_of_two, tl, wrong_dtype
from .kda_triton import objection as prefill_objection
from .kda_verify import kda_commit, kda_verify, kda_verify_into

VALUES = 32  # of the state that a program has
CHANNELS = 512  # of a window that a program moves


@jit
def advanced(s, queries, keys, values, decay, wanted):
    """A token against the state [BV, BK]: the state after it, u, o."""
    s *= tl.exp(decay)[None, :]
    u = (values - tl.sum(s * keys[None, :], 1)) * wanted
    s += u[:, None] * keys[None, :]
    return s, u, tl.sum(s * queries[None, :], 1)


@jit
def verify_kernel(
    q, k, v, g, beta, state, slots, cu, rec_u, rec_k, rec_g, out,
    q_row, q_head, k_row, k_head, v_row, v_head, g_row, g_head, beta_row, beta_head,
    state_slot, state_head, state_row, u_slot, u_row, u_head, key_slot, key_row, key_head,
    decay_slot, decay_row, decay_head, out_row, out_head, T, R, H, K, V, J,
    ZERO: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    row, head, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    key, value = tl.arange(0, BK), part * BV + tl.arange(0, BV)
    wide, inside = key < K, value < V
    begin = tl.load(cu + row).to(tl.int64)
    if row == R:  # token rows of nobody
        if ZERO:
            for token in range(begin, T):
                nothing = tl.zeros((BV,), tl.float32).to(out.dtype.element_ty)
                tl.store(out + token * out_row + head * out_head + value, nothing, mask=inside)
    else:
        count, slot = (tl.load(cu + row + 1) - begin).to(tl.int32), tl.load(slots + row).to(tl.int64)
        held = inside[:, None] & wide[None, :] & (count > 0)
        at = state + slot * state_slot + head * state_head + value[:, None] * state_row + key[None, :]
        s = tl.load(at, mask=held, other=0.0)
        for i in range(count):
            token = begin + i
            keys = tl.load(k + token * k_row + head * k_head + key, mask=wide, other=0.0)
            step = tl.load(g + token * g_row + head * g_head + key, mask=wide, other=0.0)
            values = tl.load(v + token * v_row + head * v_head + value, mask=inside, other=0.0).to(tl.float32)
            queries = tl.load(q + token * q_row + head * q_head + key, mask=wide, other=0.0).to(tl.float32)
            wanted = tl.load(beta + token * beta_row + head * beta_head)
            s, u, o = advanced(s, queries, keys.to(tl.float32), values, step, wanted)
            tl.store(out + token * out_row + head * out_head + value, o.to(out.dtype.element_ty), mask=inside)
            if i < J:
                tl.store(rec_u + slot * u_slot + i * u_row + head * u_head + value, u, mask=inside)
                if part == 0:
                    put = rec_k + slot * key_slot + i * key_row + head * key_head + key
                    tl.store(put, keys.to(tl.float32).to(rec_k.dtype.element_ty), mask=wide)
                    put = rec_g + slot * decay_slot + i * decay_row + head * decay_head + key
                    tl.store(put, step, mask=wide)


def verify(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, slots: Tensor, cu: Tensor,
    records: tuple[Tensor, Tensor, Tensor], out: Tensor, zero: bool,
) -> None:  # fmt: skip
    """All rows to ``out``, whose row 0 is token row 0; zero: token rows past cu[-1] as well."""
    (tokens, heads, keys), values, requests = q.shape, v.shape[2], slots.shape[0]
    tall = min(VALUES, power_of_two(values))
    launch(
        verify_kernel, (requests + zero, heads, blocks(values, tall)),
        q, k, v, g, beta, state, slots, cu, *records, out,
        *(n for x in (q, k, v, g, beta) for n in x.stride()[:2]), *state.stride()[:3],
        *(n for x in records for n in x.stride()[:3]), *out.stride()[:2],
        tokens, requests, heads, keys, values, records[0].shape[1],
        ZERO=zero, BK=power_of_two(keys), BV=tall,
    )  # fmt: skip


@kda_verify.impl("triton", objection=prefill_objection, note="token by token on a state read once")
def kda_verify_triton(
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
    """As the meaning, except that a row longer than J is not refused, for which it would have to wait for the
    device: its tokens past the J that the records hold are computed and not recorded.
    """
    out = v.new_empty(v.shape)
    verify(q, k, v, g, beta, state, slots, cu, (rec_u, rec_k, rec_g), out, zero=True)
    return out


@kda_verify_into.impl("triton", objection=prefill_objection, note="token by token on a state read once")
def kda_verify_into_triton(
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
    """As kda_verify of this file."""
    verify(q, k, v, g, beta, state, slots, cu, (rec_u, rec_k, rec_g), out[start:], zero=False)


@jit
def move_of(slots, accepted, into, row, S, N, J, IN_PLACE: tl.constexpr):
    """(whether this launch makes the row's move, slot, count, into)."""
    slot, place = tl.load(slots + row).to(tl.int64), tl.load(into + row).to(tl.int64)
    count = tl.load(accepted + row).to(tl.int32)
    right = (count >= 0) & (count <= J) & (slot >= 0) & (slot < N) & (place >= 0) & (place < S)
    if IN_PLACE:
        moves = right & (slot == place) & (count > 0)
    else:
        moves = right & (slot != place)
    return moves, slot, count, place


@jit
def state_kernel(
    state, rec_u, rec_k, rec_g, slots, accepted, into,
    state_layer, state_slot, state_head, state_row, u_layer, u_slot, u_row, u_head,
    key_layer, key_slot, key_row, key_head, decay_layer, decay_slot, decay_row, decay_head,
    H, K, V, S, N, J,
    IN_PLACE: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(2)
    layer, head = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    key, value = tl.arange(0, BK), part * BV + tl.arange(0, BV)
    wide, inside = key < K, value < V
    moves, slot, count, place = move_of(slots, accepted, into, row, S, N, J, IN_PLACE)
    if moves:
        u_at = rec_u + layer * u_layer + slot * u_slot + head * u_head + value
        k_at = rec_k + layer * key_layer + slot * key_slot + head * key_head + key
        g_at = rec_g + layer * decay_layer + slot * decay_slot + head * decay_head + key
        at = state + layer * state_layer + head * state_head + value[:, None] * state_row + key[None, :]
        held = inside[:, None] & wide[None, :]
        s = tl.load(at + slot * state_slot, mask=held, other=0.0)
        for i in range(count):
            u = tl.load(u_at + i * u_row, mask=inside, other=0.0)
            keys = tl.load(k_at + i * key_row, mask=wide, other=0.0).to(tl.float32)
            s *= tl.exp(tl.load(g_at + i * decay_row, mask=wide, other=0.0))[None, :]
            s = tl.fma(u[:, None], keys[None, :], s)
        tl.store(at + place * state_slot, s, mask=held)


@jit
def windows_kernel(
    window, rec_x, slots, accepted, into,
    window_layer, window_slot, window_row, x_layer, x_slot, x_row, C, S, N, J,
    IN_PLACE: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    row, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    col = tl.program_id(2) * BC + tl.arange(0, BC)
    moves, slot, count, place = move_of(slots, accepted, into, row, S, N, J, IN_PLACE)
    if moves:
        live, at = col < C, window + layer * window_layer + col
        held, fresh = at + slot * window_slot, rec_x + layer * x_layer + slot * x_slot + col
        for j in tl.static_range(3):  # row count + j of the window and what came after it
            old = tl.load(held + (count + j) * window_row, mask=live & (count + j < 3), other=0.0)
            new = tl.load(fresh + (count + j - 3) * x_row, mask=live & (count + j >= 3), other=0.0)
            kept = tl.where(count + j < 3, old.to(tl.float32), new.to(tl.float32))
            tl.store(at + place * window_slot + j * window_row, kept.to(window.dtype.element_ty), mask=live)


def commit_objection(
    state: Tensor,
    window: Tensor,
    rec_u: Tensor,
    rec_k: Tensor,
    rec_g: Tensor,
    rec_x: Tensor,
    slots: Tensor,
    accepted: Tensor,
    into: Tensor,
) -> str | None:
    """Why these arguments are not for here, or None."""
    return no_gpu(state, window, rec_u, rec_k, rec_g, rec_x, slots, accepted, into) or first_objection(
        wrong_dtype(state, rec_u, rec_g, allowed=(torch.float32,)),
        wrong_dtype(window, rec_k, rec_x),
        not_rows(state=state, window=window, rec_u=rec_u, rec_k=rec_k, rec_g=rec_g, rec_x=rec_x),
    )


@kda_commit.impl("triton", objection=commit_objection)
def kda_commit_triton(
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
    """As the meaning, except that nothing is refused, for which it would have to wait for the device: a row
    with a count outside 0..J or a slot that does not exist changes nothing, and where two rows write one slot
    either may be the last.
    """
    pools = (state, window, rec_u, rec_k, rec_g, rec_x)
    if state.dim() == 4:  # one layer
        pools = tuple(pool.unsqueeze(0) for pool in pools)
    state, window, rec_u, rec_k, rec_g, rec_x = pools
    (layers, count, heads, values, keys), (slotted, recorded) = state.shape, rec_u.shape[1:3]
    tall, moves, channels = min(VALUES, power_of_two(values)), (slots, accepted, into), window.shape[3]
    for in_place in (False, True):
        launch(
            state_kernel, (len(slots), layers * heads, blocks(values, tall)),
            state, rec_u, rec_k, rec_g, *moves,
            *(n for x in (state, rec_u, rec_k, rec_g) for n in x.stride()[:4]),
            heads, keys, values, count, slotted, recorded,
            IN_PLACE=in_place, BK=power_of_two(keys), BV=tall, num_warps=8,
        )  # fmt: skip
        launch(
            windows_kernel, (len(slots), layers, blocks(channels, CHANNELS)), window, rec_x, *moves,
            *window.stride()[:3], *rec_x.stride()[:3], channels, count, slotted, recorded,
            IN_PLACE=in_place, BC=CHANNELS,
        )  # fmt: skip
