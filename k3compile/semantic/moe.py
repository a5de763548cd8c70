"""The feed-forwards: every expert computed for every token, and weights of zero where it was not chosen.

    x -> router (float64) -> TopK -> weights [B, T, E], zero but for the chosen
    z -> all experts [B, E, T, L] -> weighted sum over E -> norm, up -> + shared MLP

B sequences, T tokens, D width, L latent, E experts, I inner width.
"""

from __future__ import annotations

from torch import Tensor

from ..runtime.moe import DenseExperts, Mlp, Moe, PackedExperts
from .builder import Builder


def mlp(build: Builder, layer: Mlp, x: str) -> str:
    """x [B, T, D] -> [B, T, D]"""
    gate, up = (build.linear(x, n, getattr(layer, n).weight) for n in ("gate_proj", "up_proj"))
    inner = situ(build, gate, up, layer.beta, layer.linear_beta)
    return build.linear(inner, "down_proj", layer.down_proj.weight)


def situ(build: Builder, gate: str, up: str, beta: float, linear_beta: float) -> str:
    """Both branches softly capped, the sigmoid on the uncapped gate; beta 0.0 is silu(gate) * up."""
    opened = build.op("Sigmoid", gate)
    if beta == 0.0:
        return build.op("Mul", build.op("Mul", gate, opened), up)
    return build.op("Mul", build.op("Mul", capped(build, gate, beta), opened), capped(build, up, linear_beta))


def capped(build: Builder, x: str, bound: float) -> str:
    """bound * tanh(x / bound)"""
    limit = build.number(bound)
    return build.op("Mul", build.op("Tanh", build.op("Div", x, limit)), limit)


def moe(build: Builder, layer: Moe, x: str) -> str:
    """x [B, T, D] -> [B, T, D]"""
    weights = route(build, layer, x)
    shared = mlp(build.at("shared_experts"), layer.shared_experts, x)
    if layer.routed_expert_down_proj is None:
        return build.op("Add", routed(build, layer, x, weights), shared)
    z = build.linear(x, "routed_expert_down_proj", layer.routed_expert_down_proj.weight)
    y = routed(build, layer, z, weights)
    norm = layer.routed_expert_norm
    y = build.rms_norm(y, "routed_expert_norm.weight", norm.weight, norm.eps)
    y = build.linear(y, "routed_expert_up_proj", layer.routed_expert_up_proj.weight)
    return build.op("Add", y, shared)


def route(build: Builder, layer: Moe, x: str) -> str:
    """Weights [B, T, E]. Scores in float64 as the router's, ties to the lower expert as TopK says."""
    types = build.onnx.TensorProto
    gate = build.op("Transpose", build.weight("gate", layer.gate), perm=[1, 0])
    wide = [build.op("Cast", value, to=types.DOUBLE) for value in (x, gate)]
    scores = build.op("Cast", build.op("Sigmoid", build.op("MatMul", *wide)), to=types.FLOAT)
    bias = build.weight("e_score_correction_bias", layer.e_score_correction_bias)
    _, ids = build.op(
        "TopK", build.op("Add", scores, bias), build.ints(layer.top_k), outputs=2, axis=-1, largest=1
    )
    chosen = build.op("GatherElements", scores, ids, axis=2)
    if layer.renormalize:
        total = build.op("ReduceSum", chosen, build.ints(-1), keepdims=1)
        chosen = build.op("Div", chosen, build.op("Add", total, build.number(1e-20)))
    chosen = build.op("Mul", chosen, build.number(layer.scale))
    nothing = build.op("Mul", scores, build.number(0.0))
    return build.op("ScatterElements", nothing, ids, chosen, axis=2)


def routed(build: Builder, layer: Moe, z: str, weights: str) -> str:
    """z [B, T, L], weights [B, T, E] -> the weighted sum over experts [B, T, L]"""
    experts, scope = layer.experts, build.at("experts")
    each = build.op("Unsqueeze", z, build.ints(1))  # [B, 1, T, L]
    gate, up = (scope.op("MatMul", each, matrix(scope, experts, n)) for n in ("w1", "w3"))
    inner = situ(scope, gate, up, experts.beta, experts.linear_beta)
    rows = scope.op("MatMul", inner, matrix(scope, experts, "w2"))  # [B, E, T, L]
    by_expert = build.op("Unsqueeze", build.op("Transpose", weights, perm=[0, 2, 1]), build.ints(3))
    return build.op("ReduceSum", build.op("Mul", rows, by_expert), build.ints(1), keepdims=0)


def matrix(build: Builder, experts: PackedExperts | DenseExperts, name: str) -> str:
    """One of the expert matrices, transposed to [E, in, out]."""
    weight: Tensor = getattr(experts, name)
    if isinstance(experts, PackedExperts):
        values = build.packed(name, weight, getattr(experts, f"{name}_scale"))
    else:
        values = build.weight(name, weight)
    return build.op("Transpose", values, perm=[0, 2, 1])
