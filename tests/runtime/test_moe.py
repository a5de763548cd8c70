"""Experts against a loop over tokens, and what happens when several ranks sum."""

import dataclasses

import pytest
import torch
from k3compile.kernels.mxfp4 import unpack
from k3compile.runtime import moe
from small_models import SMALL, SMALL_LINEAR, small_model
from torch.nn import functional as F

D = torch.float64
CONFIGS = {
    "latent, packed": SMALL,
    "full width, dense": SMALL_LINEAR,
    "latent, dense": dataclasses.replace(SMALL, experts_packed=False),
    "three of eight, scaled": dataclasses.replace(SMALL, num_experts_per_token=3, routed_scaling_factor=2.5),
    "not renormalised": dataclasses.replace(SMALL_LINEAR, moe_renormalize=False),
}


def act(config, gate, up):
    if not config.situ_beta:
        return F.silu(gate) * up
    capped = config.situ_beta * torch.tanh(gate / config.situ_beta) * torch.sigmoid(gate)
    return capped * config.situ_linear_beta * torch.tanh(up / config.situ_linear_beta)


def matrices(experts, expert):
    if isinstance(experts, moe.DenseExperts):
        return experts.w1[expert], experts.w3[expert], experts.w2[expert]
    return tuple(
        unpack(getattr(experts, name)[expert], getattr(experts, f"{name}_scale")[expert], D)
        for name in ("w1", "w3", "w2")
    )


def written_out(layer, x, config):
    """Token by token; -> the routed part before its norm, and the whole."""
    routed = []
    for row in x:
        scores = torch.sigmoid(layer.gate @ row)
        ids = torch.argsort(-(scores + layer.e_score_correction_bias))[: config.num_experts_per_token]
        weights = scores[ids]
        if config.moe_renormalize:
            weights = weights / (weights.sum() + 1e-20)
        weights = weights * config.routed_scaling_factor
        z = layer.routed_expert_down_proj.weight @ row if layer.routed_expert_down_proj else row
        total = 0
        for weight, expert in zip(weights, ids):
            w1, w3, w2 = matrices(layer.experts, expert)
            total = total + weight * (w2 @ act(config, w1 @ z, w3 @ z))
        routed.append(total)
    routed = torch.stack(routed)
    shared = layer.shared_experts
    inner = act(config, x @ shared.gate_proj.weight.T, x @ shared.up_proj.weight.T)
    return routed, inner @ shared.down_proj.weight.T


def tail(layer, routed, shared):
    """Norm and up-projection where there is a latent, then the sum."""
    if layer.routed_expert_up_proj:
        scale = torch.rsqrt(routed.square().mean(-1, keepdim=True) + 1e-5)
        routed = (routed * scale * layer.routed_expert_norm.weight) @ layer.routed_expert_up_proj.weight.T
    return routed + shared


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_layer_is_a_weighted_sum_of_chosen_experts_beside_a_shared_one(config):
    layer = small_model(config).layers[1].ffn
    x = torch.randn(7, 32, dtype=D)
    with torch.no_grad():
        torch.testing.assert_close(
            layer(x), tail(layer, *written_out(layer, x, config)), rtol=1e-10, atol=1e-12
        )


def test_partial_sums_are_reduced_before_the_norm_and_the_shared_part_once(monkeypatch):
    reduced = []

    def three_ranks(x, group):
        reduced.append(x.shape[-1])
        return 3 * x  # as if three ranks had given the same

    layer = small_model().layers[1].ffn
    x = torch.randn(7, 32, dtype=D)
    monkeypatch.setattr(moe, "all_reduce", three_ranks)
    routed, shared = written_out(layer, x, SMALL)
    with torch.no_grad():
        out = layer(x)
    assert sorted(reduced) == [32, 64]  # the shared part at full width, the routed one in the latent
    torch.testing.assert_close(out, tail(layer, 3 * routed, 3 * shared), rtol=1e-10, atol=1e-12)


def test_an_expert_that_is_elsewhere_adds_nothing(monkeypatch):
    layer = small_model().layers[1].ffn
    z = torch.randn(5, 64, dtype=D)
    rows = torch.randn(4, 64, dtype=D)
    rows[0] = torch.nan  # nobody's
    idx = torch.tensor([[3, -1], [-1, -1], [2, 1], [-1, 3], [1, 1]], dtype=torch.int32)
    weights = torch.rand(5, 2, dtype=D)
    monkeypatch.setattr(layer.experts, "forward", lambda z, ids: (rows, idx))
    total = layer.routed(z, weights, torch.zeros(5, 2, dtype=torch.int64))
    expected = torch.zeros(5, 64, dtype=D)
    for t in range(5):
        for j in range(2):
            if idx[t, j] >= 0:
                expected[t] += weights[t, j] * rows[idx[t, j]]
    torch.testing.assert_close(total, expected)


def test_a_dense_layer_is_one_gated_mlp():
    layer = small_model().layers[0].ffn
    x = torch.randn(3, 32, dtype=D)
    inner = act(SMALL, x @ layer.gate_proj.weight.T, x @ layer.up_proj.weight.T)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), inner @ layer.down_proj.weight.T)
