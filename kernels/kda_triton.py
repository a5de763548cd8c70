"""KDA in Triton, registered: the decay a token at a time, and whole rows by kda_sweep_triton.

    kda_prefill  --.                              .-- a new out
    .._export    --+--> run(.., Places, out) -----+-- rows start .. start + cu[-1] of the caller's
    .._into      --'                              '-- states, and a checkpoint where the columns say so

T token rows, R requests, H heads, K and V channels of a head, S slots.
"""

import torch
from torch import Tensor

from .jit_triton import blocks, first_objection, jit, launch, no_gpu, not_rows, power_of_two, tl, wrong_dtype
from .kda import kda_decay, kda_prefill, kda_prefill_into
from .kda_chunk_triton import rows_at
from .kda_decode_triton import log_decay
from .kda_export import kda_prefill_export, kda_prefill_export_into
from .kda_sweep_triton import Places, run

TOKENS = 16  # of a program of the decay
WIDEST = 128  # channels of a head: two halves of the state are carried
NOTE = "chunks of 64, a program for each row, head and block of values"


@jit
def kda_decay_kernel(
    f, a_log, dt_bias, g, f_row, f_head, T, H, K, lower_bound,
    BOUNDED: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1)
    col = tl.arange(0, BK)
    live, wide = token < T, col < K
    shifted = rows_at(f + head * f_head, f_row, token, col, live, wide)
    shifted += tl.load(dt_bias + head * K + col, mask=wide, other=0.0).to(tl.float32)[None, :]
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    put = (token.to(tl.int64)[:, None] * H + head) * K + col[None, :]
    result = log_decay(shifted, rate, lower_bound, BOUNDED)
    tl.store(g + put, result, mask=live[:, None] & wide[None, :])


def decay_objection(f: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> str | None:
    """Why these arguments are not for here, or None."""
    return no_gpu(f, a_log, dt_bias) or first_objection(wrong_dtype(f, a_log, dt_bias), not_rows(f=f))


@kda_decay.impl("triton", objection=decay_objection)
def kda_decay_triton(f: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """As the meaning."""
    tokens, heads, keys = f.shape
    g = f.new_empty(f.shape, dtype=torch.float32)
    launch(
        kda_decay_kernel, (blocks(tokens, TOKENS), heads), f, a_log, dt_bias, g, f.stride(0), f.stride(1),
        tokens, heads, keys, lower_bound, BOUNDED=lower_bound != 0.0, BT=TOKENS, BK=power_of_two(keys),
    )  # fmt: skip
    return g


def objection(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    cu: Tensor,
    *more: Tensor | int,
) -> str | None:
    """Why these arguments are not for here, or None. more: export columns, records, ``out`` and its start."""
    tensors = [x for x in more if isinstance(x, Tensor)]
    floats = [x for x in tensors if x.is_floating_point()]
    widest = max(k.shape[2], v.shape[2])
    return no_gpu(q, k, v, g, beta, state, slots, cu, *tensors) or first_objection(
        wrong_dtype(q, k, v, *floats),
        wrong_dtype(g, beta, state, allowed=(torch.float32,)),
        not_rows(q=q, k=k, v=v, g=g, state=state),
        not_rows(**{f"argument {9 + i}": x for i, x in enumerate(more) if any(x is y for y in floats)}),
        f"heads of {widest} channels, more than {WIDEST}" if widest > WIDEST else None,
    )


@kda_prefill.impl("triton", objection=objection, note=NOTE)
def kda_prefill_triton(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, slots: Tensor, cu: Tensor
) -> Tensor:
    """As the meaning."""
    out = v.new_empty(v.shape)
    run(q, k, v, g, beta, state, Places(slots, cu), out, zero=True)
    return out


@kda_prefill_into.impl("triton", objection=objection, note=NOTE)
def kda_prefill_into_triton(
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
    """As the meaning."""
    run(q, k, v, g, beta, state, Places(slots, cu), out[start:], zero=False)


@kda_prefill_export.impl("triton", objection=objection, note=NOTE)
def kda_prefill_export_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    cu: Tensor,
    export_offset: Tensor,
    export_slot: Tensor,
) -> Tensor:
    """As the meaning, except that a wrong offset or slot is not refused, for which it would have to wait for
    the device: such a row leaves no checkpoint, and nothing outside the pool is written.
    """
    out = v.new_empty(v.shape)
    run(q, k, v, g, beta, state, Places(slots, cu, export_offset, export_slot), out, zero=True)
    return out


@kda_prefill_export_into.impl("triton", objection=objection, note=NOTE)
def kda_prefill_export_into_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    cu: Tensor,
    export_offset: Tensor,
    export_slot: Tensor,
    out: Tensor,
    start: int,
) -> None:
    """As kda_prefill_export of this file."""
    run(q, k, v, g, beta, state, Places(slots, cu, export_offset, export_slot), out[start:], zero=False)
