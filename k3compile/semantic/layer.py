"""One decoder layer, or the whole text model, as an ONNX graph of standard operators.

layer   p [B, T, D], blocks [n, B, T, D], the layer's state -> p_out [B, T, D], the state after it
model   tokens [B, T], every layer's state                  -> logits [B, T, vocabulary], every state
"""

from __future__ import annotations

from typing import Any

from ..runtime.attention import Kda
from ..runtime.model import DecoderLayer, DepthMix, Model
from ..runtime.moe import Moe
from .attention import kda, mla
from .builder import Builder
from .moe import mlp, moe


def layer_to_onnx(model: Model, index: int, checkpoint: bool = False) -> Any:
    """Layer ``index`` (from 0) of ``model`` in float32 -> an ``onnx.ModelProto``.

    checkpoint: cut the recurrence at the input ``checkpoint_at`` [1] int64 and put out the state and the conv
    window there, as two LinearAttention nodes; for KDA layers. Raises ValueError for a layer that is not
    there, a checkpoint of MLA, weights over 2 GB, and where onnx is not installed.
    """
    layers = model.config.num_hidden_layers
    if not 0 <= index < layers:
        raise ValueError(f"layer {index} does not exist: layers are 0 .. {layers - 1}")
    block = model.layers[index]
    if checkpoint and not isinstance(block.self_attn, Kda):
        first = next(i for i, other in enumerate(model.layers) if isinstance(other.self_attn, Kda))
        raise ValueError(f"layer {index} is MLA and has no state to cut: choose a KDA layer, as {first}")
    build, width = Builder(), model.config.hidden_size
    p = build.input("p", "B", "T", width)
    blocks = build.input("blocks", "n", "B", "T", width) if block.mlp_res is not None else None
    out = decoder_layer(build.at(f"layers.{index}"), block, p, blocks, f"layers.{index}", checkpoint)
    build.output("p_out", out, "B", "T", width)
    return build.model(f"{model.config.family}.layers.{index}")


def model_to_onnx(model: Model, checkpoint: bool = False) -> Any:
    """All of ``model``, tokens to logits; see :func:`layer_to_onnx`. One ``checkpoint_at`` cuts every KDA."""
    config, build = model.config, Builder()
    tokens = build.input("tokens", "B", "T", kind="INT64")
    table = build.weight("embed_tokens.weight", model.embed_tokens)
    p, bank = build.op("Gather", table, tokens), None
    for index, block in enumerate(model.layers):
        if block.snapshot:
            banked = build.op("Unsqueeze", p, build.ints(0))
            bank = banked if bank is None else build.op("Concat", bank, banked, axis=0)
        split = checkpoint and isinstance(block.self_attn, Kda)
        p = decoder_layer(build.at(f"layers.{index}"), block, p, bank, f"layers.{index}", split)
    if model.output_attn_res is not None:
        p = depth_mix(build.at("output_attn_res"), model.output_attn_res, p, bank)
    hidden = build.rms_norm(p, "norm.weight", model.norm.weight, model.norm.eps)
    if model.lm_head is None:
        logits = build.op("MatMul", hidden, build.op("Transpose", table, perm=[1, 0]))
    else:
        logits = build.linear(hidden, "lm_head", model.lm_head.weight)
    build.output("logits", logits, "B", "T", config.vocab_size)
    return build.model(config.family)


def decoder_layer(
    build: Builder, block: DecoderLayer, p: str, blocks: str | None, name: str, checkpoint: bool
) -> str:
    """p [B, T, D] -> p after the layer; at a snapshot layer the last of ``blocks`` is ``p`` itself."""
    h = p
    if block.self_attention_res is not None:
        earlier = blocks
        if block.snapshot:
            earlier = build.op("Slice", blocks, build.ints(0), build.ints(-1), build.ints(0))
        h = depth_mix(build.at("self_attention_res"), block.self_attention_res, p, earlier)
    norm = block.input_layernorm
    x = build.rms_norm(h, "input_layernorm.weight", norm.weight, norm.eps)
    scope = build.at("self_attn")
    if isinstance(block.self_attn, Kda):
        a = kda(scope, block.self_attn, x, name, checkpoint)
    else:
        a = mla(scope, block.self_attn, x, name)
    p = h = a if block.snapshot else build.op("Add", p, a)
    if block.mlp_res is not None:
        h = depth_mix(build.at("mlp_res"), block.mlp_res, p, blocks)
    norm = block.post_attention_layernorm
    x = build.rms_norm(h, "post_attention_layernorm.weight", norm.weight, norm.eps)
    ffn = moe if isinstance(block.ffn, Moe) else mlp
    return build.op("Add", p, ffn(build.at("ffn"), block.ffn, x))


def depth_mix(build: Builder, mix: DepthMix, p: str, blocks: str) -> str:
    """A softmax over the running sum and the snapshots [n, B, T, D], scored on the normalised rows."""
    rows = build.op("Concat", blocks, build.op("Unsqueeze", p, build.ints(0)), axis=0)  # [n + 1, B, T, D]
    gain = build.op("Mul", build.weight("norm", mix.norm), build.weight("proj", mix.proj))
    along = build.op("ReduceSum", build.op("Mul", rows, gain), build.ints(-1), keepdims=1)
    square = build.op("ReduceMean", build.op("Mul", rows, rows), build.ints(-1), keepdims=1)
    scores = build.op("Div", along, build.op("Sqrt", build.op("Add", square, build.number(mix.eps))))
    weights = build.op("Softmax", scores, axis=0)
    return build.op("ReduceSum", build.op("Mul", weights, rows), build.ints(0), keepdims=0)
