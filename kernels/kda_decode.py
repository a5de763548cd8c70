"""A step of KDA for rows of one token, from the raw projections to the gated output, as one op.

    qkv --short_conv--> q, k, v --l2_norm--> .--kda_prefill--> o --gated_rms_norm--> y
    f  --kda_decay--> g, b --sigmoid--> beta -'     gate ----------------'

Fused, the state is read and written once and nothing else touches memory in between. R requests, one token
row each; H heads, K and V channels of a head, C = 2HK + HV, S slots.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .conv import KEPT, TAPS, short_conv
from .kda import kda_decay, kda_prefill
from .norm import gated_rms_norm, l2_norm
from .op import acc_of, op
from .samples import Draw, gapped


@op(writes=("window", "state"), opaque=True, fused=True)
def kda_decode(
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
    """One token of every request; its slot's window and state move on.  -> y [R, H, V] like gate.

    qkv [R, C] raw, conv_weight [C, 4] acc, f [R, H, K], b [R, H] before its sigmoid, gate [R, H, V],
    a_log [H] acc, dt_bias [H*K] acc, norm_w [V] acc, window(a!) [S, 3, C], state(b!) [S, H, V, K] acc,
    slots [R], all different. lower_bound as in kda_decay.
    """
    (rows, heads, keys), values = f.shape, gate.shape[2]
    cu = torch.arange(rows + 1, device=qkv.device)
    mixed = short_conv.meaning(qkv, conv_weight, window, slots, cu)
    q, k = mixed[:, : 2 * heads * keys].view(rows, 2, heads, keys).unbind(1)
    v = mixed[:, 2 * heads * keys :].view(rows, heads, values)
    q, k = l2_norm.meaning(q, keys**-0.5), l2_norm.meaning(k, 1.0)
    g = kda_decay.meaning(f, a_log, dt_bias, lower_bound)
    o = kda_prefill.meaning(q, k, v, g, torch.sigmoid(acc_of(b)), state, slots, cu)
    return gated_rms_norm.meaning(o, gate, norm_w, eps)


@kda_decode.fake
def _(qkv, conv_weight, f, b, gate, a_log, dt_bias, norm_w, window, state, slots, lower_bound, eps) -> Tensor:
    return gate.new_empty(gate.shape)


@kda_decode.samples
def _(dtype: torch.dtype) -> Iterator[tuple]:
    draw, slots, heads, keys, values = Draw(dtype), 8, 3, 20, 12
    channels = 2 * heads * keys + heads * values
    for i, rows in enumerate((0, 1, 5, 4)):
        bound = -5.0 if i < 3 else 0.0
        packed = draw.normal(rows, channels + heads * (keys + values))
        qkv, f, gate = packed.split([channels, heads * keys, heads * values], 1)
        if not rows:
            qkv, f, gate = (part.new_empty(part.shape) for part in (qkv, f, gate))
        window, state = draw.normal(slots, KEPT, channels), draw.normal_acc(slots, heads, values, keys)
        if i % 2:
            window, state = gapped(window), gapped(state)
        scalars = draw.normal_acc(heads), draw.normal_acc(heads * keys), draw.normal_acc(values)
        yield (
            qkv, draw.normal_acc(channels, TAPS), f.view(rows, heads, keys), draw.normal(rows, heads),
            gate.view(rows, heads, values), *scalars, window, state, draw.choice(rows, slots), bound, 1e-5,
        )  # fmt: skip
