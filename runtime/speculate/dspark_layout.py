"""The released tensor names of a DSpark draft, and where each tensor goes in our DSparkModel.

    file   layers.{i}.self_attn.kv_a_proj_with_mqa.weight [L+r, D]     model   kv_a_proj[i]
           layers.{i}.self_attn.kv_a_layernorm.weight [L]                      kv_a_layernorm[i]
           embed_tokens.weight [V, D]                                          nowhere: the target's is used

One file, ``model.safetensors``, all bfloat16, and no head: the target's serves both. D width, V vocabulary,
L latent, r rotated.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..layout import Entry
from .dspark_config import DSparkConfig

SHARED = "embed_tokens.weight"  # shipped with the draft; a copy of the target's
STORED = torch.bfloat16


def entries(config: DSparkConfig) -> Iterator[Entry]:
    """Every tensor of the file, in model order; the shared one has no parameter of ours."""
    hidden, vocab, rank = config.hidden_size, config.vocab_size, config.markov_rank
    taps = len(config.target_layer_ids) * config.target_hidden_size
    yield same("context_proj.weight", hidden, taps)
    yield same("context_norm.weight", hidden)
    yield Entry(SHARED, (vocab, hidden), STORED, "")
    for layer in range(config.num_hidden_layers):
        yield from layer_entries(config, layer)
    yield same("final_norm.weight", hidden)
    yield Entry("markov_head.markov_w1.weight", (vocab, rank), STORED, "markov_w1")
    yield Entry("markov_head.markov_w2.weight", (vocab, rank), STORED, "markov_w2")
    yield Entry("confidence_head.proj.weight", (1, hidden + rank), STORED, "confidence_weight")
    yield Entry("confidence_head.proj.bias", (1,), STORED, "confidence_bias")


def same(name: str, *shape: int) -> Entry:
    """A tensor that the model calls as the file does."""
    return Entry(name, shape, STORED, name)


def layer_entries(config: DSparkConfig, layer: int) -> Iterator[Entry]:
    """One layer of the draft."""
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    rank, latent = config.q_lora_rank, config.kv_lora_rank
    for name, shape in (
        ("input_layernorm", (hidden,)),
        ("post_attention_layernorm", (hidden,)),
        ("mlp.gate_proj", (inner, hidden)),
        ("mlp.up_proj", (inner, hidden)),
        ("mlp.down_proj", (hidden, inner)),
        ("self_attn.q_a_proj", (rank, hidden)),
        ("self_attn.q_a_layernorm", (rank,)),
        ("self_attn.q_b_proj", (heads * config.head_width, rank)),
        ("self_attn.kv_b_proj", (heads * (config.qk_nope_head_dim + config.v_head_dim), latent)),
        ("self_attn.o_proj", (hidden, heads * config.v_head_dim)),
    ):
        yield same(f"layers.{layer}.{name}.weight", *shape)
    ours = f"layers.{layer}.self_attn"
    yield Entry(f"{ours}.kv_a_proj_with_mqa.weight", (config.row, hidden), STORED, "kv_a_proj", layer)
    yield Entry(f"{ours}.kv_a_layernorm.weight", (latent,), STORED, "kv_a_layernorm", layer)


def num_parameters(config: DSparkConfig) -> int:
    """Numbers in the file."""
    return sum(torch.Size(entry.shape).numel() for entry in entries(config))
