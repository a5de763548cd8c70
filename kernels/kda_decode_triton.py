"""A KDA step in Triton: a program has one head of one request, its whole state [V, K] in registers.

    window, raw token -> q, k, v -> S decayed, corrected, read -> norm, gate -> y
    each channel of the window and each element of the state belongs to one program, so both move in place

R requests, H heads, K and V channels of a head.
"""

from torch import Tensor

from .jit_triton import first_objection, jit, launch, no_gpu, not_rows, power_of_two, tl, wrong_dtype
from .kda_decode import kda_decode
from .norm import L2_EPS

WARPS = 8
LARGEST = 128 * 128  # elements of a head's state that fit the registers of eight warps


@jit
def convolved(raw, weight, window, weight_row, window_row, channel, live):
    """silu of four taps over the window and the new token; the window moves on by one."""
    at = window + channel
    first = tl.load(at, mask=live, other=0.0)
    second = tl.load(at + window_row, mask=live, other=0.0)
    third = tl.load(at + 2 * window_row, mask=live, other=0.0)
    new = tl.load(raw + channel, mask=live, other=0.0)
    tap = weight + channel * weight_row
    total = first.to(tl.float32) * tl.load(tap, mask=live, other=0.0).to(tl.float32)
    total += second.to(tl.float32) * tl.load(tap + 1, mask=live, other=0.0).to(tl.float32)
    total += third.to(tl.float32) * tl.load(tap + 2, mask=live, other=0.0).to(tl.float32)
    total += new.to(tl.float32) * tl.load(tap + 3, mask=live, other=0.0).to(tl.float32)
    tl.store(at, second, mask=live)
    tl.store(at + window_row, third, mask=live)
    tl.store(at + 2 * window_row, new.to(tl.float32).to(window.dtype.element_ty), mask=live)
    return total * tl.sigmoid(total)


@jit
def log_decay(f, rate, lower_bound, BOUNDED: tl.constexpr):
    """The two gates of kda_decay, of f + dt_bias and exp(a_log)."""
    if BOUNDED:
        result = lower_bound * tl.sigmoid(rate * f)
    else:
        small = tl.exp(-tl.abs(f))
        near = 1.0 + small
        lost = (small - (near - 1.0)) / near
        result = -rate * (tl.maximum(f, 0.0) + (tl.log(near) + lost))
    return result


@jit
def kda_decode_kernel(
    qkv, conv_weight, f, b, gate, a_log, dt_bias, norm_w, window, state, slots, y,
    qkv_row, weight_row, f_row, f_head, b_row, b_head, gate_row, gate_head, window_slot, window_row,
    state_slot, H, K, V, lower_bound, scale, l2_eps, eps,
    BOUNDED: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key, value = tl.arange(0, BK), tl.arange(0, BV)
    in_k, in_v = key < K, value < V
    slot = tl.load(slots + row).to(tl.int64)
    raw, window = qkv + row * qkv_row, window + slot * window_slot
    q = convolved(raw, conv_weight, window, weight_row, window_row, head * K + key, in_k)
    k = convolved(raw, conv_weight, window, weight_row, window_row, H * K + head * K + key, in_k)
    v = convolved(raw, conv_weight, window, weight_row, window_row, 2 * H * K + head * V + value, in_v)
    q = q * (tl.rsqrt(tl.sum(q * q, 0) + l2_eps) * scale)
    k = k * tl.rsqrt(tl.sum(k * k, 0) + l2_eps)

    shifted = tl.load(f + row * f_row + head * f_head + key, mask=in_k, other=0.0).to(tl.float32)
    shifted += tl.load(dt_bias + head * K + key, mask=in_k, other=0.0).to(tl.float32)
    decay = tl.exp(log_decay(shifted, tl.exp(tl.load(a_log + head).to(tl.float32)), lower_bound, BOUNDED))
    beta = tl.sigmoid(tl.load(b + row * b_row + head * b_head).to(tl.float32))

    live = in_v[:, None] & in_k[None, :]
    at = state + slot * state_slot + head * (K * V) + value[:, None] * K + key[None, :]
    s = tl.load(at, mask=live, other=0.0) * decay[None, :]
    u = (v - tl.sum(s * k[None, :], 1)) * beta
    s += u[:, None] * k[None, :]
    tl.store(at, s, mask=live)
    o = tl.sum(s * q[None, :], 1)

    unit = o * tl.rsqrt(tl.sum(o * o, 0) / V + eps)
    gain = tl.load(norm_w + value, mask=in_v, other=0.0).to(tl.float32)
    opened = tl.load(gate + row * gate_row + head * gate_head + value, mask=in_v, other=0.0).to(tl.float32)
    put = y + (row * H + head) * V + value
    tl.store(put, (unit * gain * tl.sigmoid(opened)).to(y.dtype.element_ty), mask=in_v)


def objection(
    qkv, conv_weight, f, b, gate, a_log, dt_bias, norm_w, window, state, slots, lower_bound, eps
) -> str | None:
    """Why these arguments are not for here, or None."""
    values, keys = state.shape[2:]
    size = power_of_two(values) * power_of_two(keys)
    return no_gpu(
        qkv, conv_weight, f, b, gate, a_log, dt_bias, norm_w, window, state, slots
    ) or first_objection(
        wrong_dtype(qkv, conv_weight, f, b, gate, a_log, dt_bias, norm_w, window, state),
        not_rows(qkv=qkv, f=f, gate=gate, window=window, state=state),
        None if state.stride()[1:] == (values * keys, keys, 1) else "a slot's state is not in one piece",
        f"a head's state of {values} x {keys} does not fit the registers" if size > LARGEST else None,
        None if qkv.dtype == window.dtype else f"windows of {window.dtype} for rows of {qkv.dtype}",
    )


@kda_decode.impl("triton", objection=objection)
def kda_decode_triton(
    qkv: Tensor,
    conv_weight: Tensor,
    f: Tensor,
    b: Tensor,
    gate: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_w: Tensor,
    window: Tensor,
    state: Tensor,
    slots: Tensor,
    lower_bound: float,
    eps: float,
) -> Tensor:
    """As the meaning, without its roundings on the way: one at the end."""
    (rows, heads, keys), values = f.shape, gate.shape[2]
    y = gate.new_empty(gate.shape)
    steps = (
        qkv.stride(0), conv_weight.stride(0), f.stride(0), f.stride(1), b.stride(0), b.stride(1),
        gate.stride(0), gate.stride(1), window.stride(0), window.stride(1), state.stride(0),
    )  # fmt: skip
    launch(
        kda_decode_kernel, (rows, heads),
        qkv, conv_weight, f, b, gate, a_log, dt_bias, norm_w, window, state, slots, y,
        *steps, heads, keys, values, lower_bound, keys**-0.5, L2_EPS, eps,
        BOUNDED=lower_bound != 0.0, BK=power_of_two(keys), BV=power_of_two(values), num_warps=WARPS,
    )  # fmt: skip
    return y
