"""One op for a KDA step gives what the ops one after another give."""

import k3compile.kernels  # noqa: F401  registers the ops
import torch
from k3compile.kernels.kda_decode import kda_decode

k3 = torch.ops.k3


def test_a_step_is_the_ops_one_after_another():
    *_, args = kda_decode.each_sample(torch.float64)
    qkv, taps, f, b, gate, a_log, dt_bias, norm_w, window, state, slots, bound, eps = args
    (rows, heads, keys), values, cu = f.shape, gate.shape[2], torch.arange(len(f) + 1)
    own_window, own_state = window.clone(), state.clone()
    mixed = k3.short_conv(qkv, taps, own_window, slots, cu)
    q, k, v = mixed.split([heads * keys, heads * keys, heads * values], 1)
    q, k = k3.l2_norm(q.view(rows, heads, keys), keys**-0.5), k3.l2_norm(k.view(rows, heads, keys), 1.0)
    g = k3.kda_decay(f, a_log, dt_bias, bound)
    o = k3.kda_prefill(q, k, v.view(rows, heads, values), g, b.sigmoid(), own_state, slots, cu)
    want = k3.gated_rms_norm(o, gate, norm_w, eps)
    torch.testing.assert_close(k3.kda_decode(*args), want)
    torch.testing.assert_close(window, own_window, rtol=0, atol=0)
    torch.testing.assert_close(state, own_state)


def test_slots_of_nobody_are_left_alone():
    *_, args = kda_decode.each_sample()
    window, state, slots = args[8], args[9], args[10]
    others = [s for s in range(len(state)) if s not in slots.tolist()]
    before = window[others].clone(), state[others].clone()
    k3.kda_decode(*args)
    assert torch.equal(window[others], before[0])
    assert torch.equal(state[others], before[1])
