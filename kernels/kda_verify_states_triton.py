"""KDA under speculation without records, in Triton: the state after every draft leaves for a slot of its own.

    program (row, head, block of V)   S, read once -> o of each token, S to the token's slot, on to the next

A program has its part of the state in registers before it writes any: a row may live in one of its targets.
T token rows, R requests, H heads, K and V channels of a head, S slots, J columns of scratch.
"""

from torch import Tensor

from .jit_triton import blocks, jit, launch, power_of_two, tl
from .kda_triton import objection
from .kda_verify_states import kda_verify_states, kda_verify_states_into
from .kda_verify_triton import VALUES, advanced

NOTE = "token by token on a state read once"


@jit
def states_kernel(
    q, k, v, g, beta, state, slots, cu, scratch, out,
    q_row, q_head, k_row, k_head, v_row, v_head, g_row, g_head, beta_row, beta_head,
    state_slot, state_head, state_row, scratch_row, scratch_col, out_row, out_head, T, R, K, V, S, J,
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
        held = inside[:, None] & wide[None, :]
        at = state + head * state_head + value[:, None] * state_row + key[None, :]
        s = tl.load(at + slot * state_slot, mask=held & (count > 0), other=0.0)
        for i in range(count):
            token = begin + i
            keys = tl.load(k + token * k_row + head * k_head + key, mask=wide, other=0.0).to(tl.float32)
            step = tl.load(g + token * g_row + head * g_head + key, mask=wide, other=0.0)
            values = tl.load(v + token * v_row + head * v_head + value, mask=inside, other=0.0).to(tl.float32)
            queries = tl.load(q + token * q_row + head * q_head + key, mask=wide, other=0.0).to(tl.float32)
            wanted = tl.load(beta + token * beta_row + head * beta_head)
            s, _, o = advanced(s, queries, keys, values, step, wanted)
            tl.store(out + token * out_row + head * out_head + value, o.to(out.dtype.element_ty), mask=inside)
            place = tl.load(scratch + row * scratch_row + i * scratch_col, mask=i < J, other=-1).to(tl.int64)
            tl.store(at + place * state_slot, s, mask=held & (place >= 0) & (place < S))


def verify_states(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, slots: Tensor, cu: Tensor,
    scratch: Tensor, out: Tensor, zero: bool,
) -> None:  # fmt: skip
    """All rows to ``out``, whose row 0 is token row 0; zero: token rows past cu[-1] as well."""
    (tokens, heads, keys), values, requests = q.shape, v.shape[2], slots.shape[0]
    tall = min(VALUES, power_of_two(values))
    launch(
        states_kernel, (requests + zero, heads, blocks(values, tall)),
        q, k, v, g, beta, state, slots, cu, scratch, out,
        *(n for x in (q, k, v, g, beta) for n in x.stride()[:2]), *state.stride()[:3], *scratch.stride(),
        *out.stride()[:2], tokens, requests, keys, values, state.shape[0], scratch.shape[1],
        ZERO=zero, BK=power_of_two(keys), BV=tall,
    )  # fmt: skip


@kda_verify_states.impl("triton", objection=objection, note=NOTE)
def kda_verify_states_triton(
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
    """As the meaning, except that nothing is refused, for which it would have to wait for the device: tokens
    past the J that scratch has slots for are computed and leave no state, nor does one whose slot does not
    exist; where two rows write one slot either may be the last.
    """
    out = v.new_empty(v.shape)
    verify_states(q, k, v, g, beta, state, slots, cu, scratch, out, zero=True)
    return out


@kda_verify_states_into.impl("triton", objection=objection, note=NOTE)
def kda_verify_states_into_triton(
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
    """As kda_verify_states of this file."""
    verify_states(q, k, v, g, beta, state, slots, cu, scratch, out[start:], zero=False)
