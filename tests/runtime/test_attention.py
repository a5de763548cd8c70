"""Both attentions against the formulas written out token by token, one head and one request at a time."""

import dataclasses

import pytest
import torch
from k3compile.runtime.attention import joined_cu, rows_of, split_slots
from small_models import SMALL, SMALL_LINEAR, Row, make_step, small_model
from torch.nn import functional as F

D = torch.float64
STEP = make_step([Row(list(range(11)), 1, 0, [1, 2, 3])])


def norm(x, w, eps=1e-5):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


def kda_written_out(layer, x, lower_bound):
    """Projection, conv, SiLU, decay, delta rule, norm, gate: no op of ours."""
    heads, width = layer.heads, layer.width
    raw = x @ layer.qkv_proj.weight.T
    padded = torch.cat([raw.new_zeros(3, raw.shape[1]), raw])
    mixed = F.silu(sum(padded[j : j + len(x)] * layer.conv_weight[:, j] for j in range(4)))
    q, k, v = (part.view(len(x), heads, width) for part in mixed.chunk(3, dim=1))
    q, k = (a * torch.rsqrt(a.square().sum(-1, keepdim=True) + 1e-6) for a in (q, k))
    q = q * width**-0.5
    f = (x @ layer.f_a_proj.weight.T @ layer.f_b_proj.weight.T + layer.dt_bias).view(len(x), heads, width)
    rate = layer.a_log.exp()[:, None]
    g = lower_bound * torch.sigmoid(rate * f) if lower_bound else -rate * F.softplus(f)
    beta = torch.sigmoid(x @ layer.b_proj.weight.T)
    gate = layer.g_proj(x).view(len(x), heads, width)
    out = torch.empty_like(v)
    for h in range(heads):
        state = torch.zeros(width, width, dtype=D)  # [K, V]
        for t in range(len(x)):
            state = g[t, h].exp()[:, None] * state
            u = state.T @ k[t, h]
            state = state + torch.outer(k[t, h], beta[t, h] * (v[t, h] - u))
            out[t, h] = state.T @ q[t, h]
    out = norm(out, layer.o_norm) * torch.sigmoid(gate)
    return out.flatten(1) @ layer.o_proj.weight.T


def mla_written_out(layer, x, config):
    """Expanded keys and values, causal softmax, gate."""
    heads, nope, rope = layer.heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    q = layer.q_proj(x).view(len(x), heads, nope + rope)
    row = x @ layer.kv_a_proj_with_mqa.weight.T
    latent = norm(row[:, : layer.latent], layer.kv_a_layernorm.weight, config.latent_norm_eps)
    kv = (latent @ layer.kv_b_proj.weight.T).view(len(x), heads, nope + config.v_head_dim)
    out = []
    for h in range(heads):
        keys = torch.cat([kv[:, h, :nope], row[:, layer.latent :]], 1)
        scores = (q[:, h] @ keys.T) * (nope + rope) ** -0.5
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        out.append(scores.softmax(-1) @ kv[:, h, nope:])
    out = torch.stack(out, 1).flatten(1)
    if config.mla_use_output_gate:
        out = out * torch.sigmoid(x @ layer.g_proj.weight.T)
    return out @ layer.o_proj.weight.T


@pytest.mark.parametrize("config", [SMALL, SMALL_LINEAR], ids=["k3", "kimi-linear"])
def test_kda_is_the_delta_rule(config):
    model = small_model(config)
    layer, pools = model.layers[0].self_attn, model.make_pools(2, 4, 4)
    x = torch.randn(11, 32, dtype=D)
    expected = kda_written_out(layer, x, config.gate_lower_bound)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, pools[0], STEP), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("config", [SMALL, SMALL_LINEAR], ids=["k3", "kimi-linear"])
@pytest.mark.parametrize("eps", [1e-5, 1e-2])
def test_mla_is_softmax_attention_over_expanded_latents(config, eps):
    config = dataclasses.replace(config, latent_norm_eps=eps)
    model = small_model(config)
    layer, pools = model.layers[3].self_attn, model.make_pools(2, 4, 4)
    x = torch.randn(11, 32, dtype=D)
    expected = mla_written_out(layer, x, config)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, pools[3], STEP), expected, rtol=1e-10, atol=1e-12)


def test_rows_and_slots_of_the_two_classes_follow_each_other():
    step = make_step([Row([1, 2], 4, 0, [1], verify=True), Row([3], 5, 3, [2]), Row([4, 5, 6], 6, 0, [3])])
    verify, other = rows_of(step, 6, torch.device("cpu"))
    assert (verify.tolist(), other.tolist()) == ([0, 1], [2, 3, 4, 5])
    slots_verify, slots_other = split_slots(step)
    assert (slots_verify.tolist(), slots_other.tolist()) == ([4], [5, 6])
    assert joined_cu(step).tolist() == [0, 2, 3, 6]


def test_spans_that_do_not_sum_to_the_rows_are_refused():
    with pytest.raises(RuntimeError):
        rows_of(STEP, 12, torch.device("cpu"))
    with pytest.raises(RuntimeError):
        split_slots(STEP._replace(slots=torch.tensor([1, 2])))
