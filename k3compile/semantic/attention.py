"""The two attentions over a rectangle of tokens: KDA by LinearAttention, MLA by plain operators.

    KDA    x -> qkv -> CausalConvWithState -> q, k, v (lengths 1) -+
           x -> decay, beta ---------------------------------------+-> LinearAttention -> norm, gate -> o_proj
    split  the same with two LinearAttention nodes: the present state of the first is the checkpoint

B sequences, T tokens, H heads, K and V key and value channels, C = H (2 K + V), S latents before this step.
"""

from __future__ import annotations

from ..kernels.conv import KEPT
from ..kernels.norm import L2_EPS
from ..runtime.attention import Kda, Mla
from ..runtime.linear import Linear
from .builder import Builder

FAR = 2**62  # an end for slices that reach to the end


def kda(build: Builder, layer: Kda, x: str, name: str, split: bool) -> str:
    """x [B, T, D] -> [B, T, D]; adds the state's inputs and outputs, called after ``name``.

    inputs   <name>.state [B, H, K, V], <name>.window [B, C, 3]; with ``split`` also checkpoint_at [1] int64
    outputs  <name>.present_state, <name>.present_window; with ``split`` also <name>.checkpoint_state and
             <name>.checkpoint_window: what they were after checkpoint_at tokens of every sequence
    """
    heads, width = layer.heads, layer.width
    channels, state_shape = 3 * heads * width, ("B", heads, width, width)
    state = build.input(f"{name}.state", *state_shape)
    window = build.input(f"{name}.window", "B", channels, KEPT)

    raw = build.op("Transpose", build.linear(x, "qkv_proj", layer.qkv_proj.weight), perm=[0, 2, 1])
    taps = build.op("Unsqueeze", build.weight("conv_weight", layer.conv_weight), build.ints(1))
    mixed, present_window = build.op(
        "CausalConvWithState", raw, taps, "", window, outputs=2, activation="silu"
    )
    rows = build.op("Transpose", mixed, perm=[0, 2, 1])
    q, k, v = build.op("Split", rows, build.ints(*[heads * width] * 3), outputs=3, axis=-1)
    q, k = (unit(build, part, heads, width) for part in (q, k))
    beta = build.op("Sigmoid", build.linear(x, "b_proj", layer.b_proj.weight))
    parts = [q, k, v, decay(build, layer, x), beta]

    if not split:
        o, present = recurrence(build, layer, parts, state)
    else:
        at = "checkpoint_at"
        if at not in [i.name for i in build.written.inputs]:
            build.input(at, 1, kind="INT64")
        first = [build.op("Slice", p, build.ints(0), at, build.ints(1)) for p in parts]
        second = [build.op("Slice", p, at, build.ints(FAR), build.ints(1)) for p in parts]
        o1, middle = recurrence(build, layer, first, state)
        o2, present = recurrence(build, layer, second, middle)
        o = build.op("Concat", o1, o2, axis=1)
        strip = build.op("Concat", window, raw, axis=2)
        end = build.op("Add", at, build.ints(KEPT))
        build.output(f"{name}.checkpoint_state", middle, *state_shape)
        kept = build.op("Slice", strip, at, end, build.ints(2))
        build.output(f"{name}.checkpoint_window", kept, "B", channels, KEPT)
    build.output(f"{name}.present_state", present, *state_shape)
    build.output(f"{name}.present_window", present_window, "B", channels, KEPT)

    normed = build.rms_norm(build.heads(o, heads, width), "o_norm", layer.o_norm, layer.eps)
    gate = build.op("Sigmoid", build.heads(projected(build, x, "g_proj", layer.g_proj), heads, width))
    return build.linear(build.flat(build.op("Mul", normed, gate)), "o_proj", layer.o_proj.weight)


def recurrence(build: Builder, layer: Kda, parts: list[str], state: str) -> list[str]:
    """q, k, v, decay, beta, all [B, T, .], from ``state`` -> [output [B, T, H * V], present state]"""
    q, k, v, g, beta = parts
    return build.op(
        "LinearAttention", q, k, v, state, g, beta, outputs=2, update_rule="gated_delta",
        q_num_heads=layer.heads, kv_num_heads=layer.heads, scale=layer.width**-0.5,
    )  # fmt: skip


def unit(build: Builder, x: str, heads: int, width: int) -> str:
    """Every head of x [B, T, H * K] at length 1, 1e-6 inside the root."""
    wide = build.heads(x, heads, width)
    square = build.op("ReduceSumSquare", wide, build.ints(-1), keepdims=1)
    root = build.op("Sqrt", build.op("Add", square, build.number(L2_EPS)))
    return build.flat(build.op("Div", wide, root))


def decay(build: Builder, layer: Kda, x: str) -> str:
    """Log decay [B, T, H * K]: bounded below by a sigmoid, or the unbounded softplus of Kimi-Linear."""
    low = build.linear(x, "f_a_proj", layer.f_a_proj.weight)
    full = build.linear(low, "f_b_proj", layer.f_b_proj.weight)
    shifted = build.op("Add", full, build.weight("dt_bias", layer.dt_bias))
    rate = build.op("Unsqueeze", build.op("Exp", build.weight("a_log", layer.a_log)), build.ints(1))  # [H, 1]
    wide = build.heads(shifted, layer.heads, layer.width)
    if layer.lower_bound == 0.0:
        return build.flat(build.op("Neg", build.op("Mul", rate, build.op("Softplus", wide))))
    bounded = build.op("Sigmoid", build.op("Mul", rate, wide))
    return build.flat(build.op("Mul", bounded, build.number(layer.lower_bound)))


def projected(build: Builder, x: str, name: str, layers: object) -> str:
    """A Linear, or a sequence of Linear and RmsNorm."""
    if isinstance(layers, Linear):
        return build.linear(x, name, layers.weight)
    for i, layer in enumerate(layers):
        if isinstance(layer, Linear):
            x = build.linear(x, f"{name}.{i}", layer.weight)
        else:
            x = build.rms_norm(x, f"{name}.{i}.weight", layer.weight, layer.eps)
    return x


def mla(build: Builder, layer: Mla, x: str, name: str) -> str:
    """x [B, T, D] -> [B, T, D]; L + r columns a latent row.

    input   <name>.latents [B, S, L + r]
    output  <name>.present_latents [B, S + T, L + r]
    """
    heads, rank = layer.heads, layer.latent
    width = layer.kv_a_proj_with_mqa.weight.shape[0]
    rope = width - rank
    nope, value = layer.width - rope, layer.kv_b_proj.weight.shape[0] // heads - (layer.width - rope)
    past = build.input(f"{name}.latents", "B", "S", width)

    q = build.heads(projected(build, x, "q_proj", layer.q_proj), heads, layer.width)
    row = build.linear(x, "kv_a_proj_with_mqa", layer.kv_a_proj_with_mqa.weight)
    latent, k_pe = build.op("Split", row, build.ints(rank, rope), outputs=2, axis=-1)
    norm = layer.kv_a_layernorm
    normed = build.rms_norm(latent, "kv_a_layernorm.weight", norm.weight, norm.eps)
    present = build.op("Concat", past, build.op("Concat", normed, k_pe, axis=-1), axis=1)
    build.output(f"{name}.present_latents", present, "B", "S_present", width)

    latents, shared = build.op("Split", present, build.ints(rank, rope), outputs=2, axis=-1)
    kv = build.heads(build.linear(latents, "kv_b_proj", layer.kv_b_proj.weight), heads, nope + value)
    k_nope, v = build.op("Split", kv, build.ints(nope, value), outputs=2, axis=-1)
    q_nope, q_pe = build.op("Split", q, build.ints(nope, rope), outputs=2, axis=-1)
    by_head = [build.op("Transpose", part, perm=[0, 2, 1, 3]) for part in (q_nope, q_pe, v)]
    keys = build.op("Transpose", k_nope, perm=[0, 2, 3, 1])  # [B, H, n, S + T]
    shared_keys = build.op("Unsqueeze", build.op("Transpose", shared, perm=[0, 2, 1]), build.ints(1))
    scores = build.op(
        "Add", build.op("MatMul", by_head[0], keys), build.op("MatMul", by_head[1], shared_keys)
    )
    scaled = build.op("Mul", scores, build.number(layer.width**-0.5))
    weights = build.op(
        "Softmax", build.op("Where", seen(build, scaled), scaled, build.number(-1e30)), axis=-1
    )
    o = build.flat(build.op("Transpose", build.op("MatMul", weights, by_head[2]), perm=[0, 2, 1, 3]))
    if layer.g_proj is not None:
        o = build.op("Mul", o, build.op("Sigmoid", projected(build, x, "g_proj", layer.g_proj)))
    return build.linear(o, "o_proj", layer.o_proj.weight)


def seen(build: Builder, scores: str) -> str:
    """[T, S + T] bool: which keys the queries, the last T of all tokens, may look at."""
    zero, one = (build.op("Squeeze", build.ints(i)) for i in (0, 1))
    count, total = (build.op("Squeeze", build.op("Shape", scores, start=i, end=i + 1)) for i in (2, 3))
    query = build.op("Range", build.op("Sub", total, count), total, one)
    return build.op(
        "LessOrEqual", build.op("Range", zero, total, one), build.op("Unsqueeze", query, build.ints(1))
    )
