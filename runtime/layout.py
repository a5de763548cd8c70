"""The released tensor names, and where each tensor goes in our Model.

    file    ...self_attn.q_proj.weight [HK, D]                 model   self_attn.qkv_proj.weight[0:HK]
            ...self_attn.k_proj.weight [HK, D]                         self_attn.qkv_proj.weight[HK:2HK]
            ...self_attn.A_log [128], zeros past H                     self_attn.a_log [H]
            ...experts.7.w1.weight_packed [I, L/2]                     ffn.experts.w1[7]

K3 prefixes its text tensors with ``language_model.``; Kimi-Linear does not. In a bfloat16 checkpoint the
convolutions, A_log, dt_bias, o_norm and the router's bias are float32. D width, H heads, K = V channels of a
KDA head, L latent, I inner.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from .config import GROUP, K3Config
from .parallel.ranks import Ranks
from .parallel.sharding import Replicate, Split
from .safetensors_dir import Cut

UNUSED = ("vision_tower.", "mm_projector.")  # parts of a K3 checkpoint that the text model does not read
A_LOG_PAD = 128  # K3 stores A_log padded with zeros to a multiple of this


class Entry(NamedTuple):
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parameter: str  # of Model
    index: int | slice | None = None  # the part of the parameter's first dimension; None: all of it
    reshaped: bool = False  # stored in another shape, perhaps padded with zeros: small, and read whole

    def under(self, file_module: str, model_module: str) -> Entry:
        """The same tensor, seen from outside a module."""
        name, parameter = f"{file_module}.{self.name}", f"{model_module}.{self.parameter}"
        return self._replace(name=name, parameter=parameter)

    def cut(self, split: Split, ranks: Ranks) -> Cut | None:
        """What a rank reads of the file's tensor, ``split`` being that of the parameter; None: all of it."""
        if ranks.size == 1 or self.reshaped or isinstance(split, Replicate):
            return None
        dim = split.dim - isinstance(self.index, int)
        each = ranks.share(self.shape[dim])
        return Cut(dim, ranks.rank * each, (ranks.rank + 1) * each)

    def of_rank(self, split: Split, ranks: Ranks) -> int | slice | None:
        """``index`` in the rank's part of the parameter: blocks that are dealt out one by one shrink."""
        if not isinstance(self.index, slice) or isinstance(split, Replicate):
            return self.index
        return slice(ranks.share(self.index.start), ranks.share(self.index.stop))


def expected_tensors(config: K3Config) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name -> (shape, dtype) of every text tensor that a checkpoint of ``config`` must hold."""
    return {entry.name: (entry.shape, entry.dtype) for entry in entries(config)}


def entries(config: K3Config) -> Iterator[Entry]:
    """Every text tensor, in model order."""
    prefix = "language_model." if config.family == "kimi_k3" else ""
    hidden, vocab, stored = config.hidden_size, config.vocab_size, main_dtype(config)
    yield Entry(f"{prefix}model.embed_tokens.weight", (vocab, hidden), stored, "embed_tokens")
    for layer in range(config.num_hidden_layers):
        for entry in layer_entries(config, layer):
            yield entry.under(f"{prefix}model.layers.{layer}", f"layers.{layer}")
    if config.attn_res_block_size:
        for entry in depth_mix(config, "output_attn_res"):
            yield entry._replace(name=f"{prefix}model.{entry.name}")
    yield Entry(f"{prefix}model.norm.weight", (hidden,), stored, "norm.weight")
    if not config.tie_word_embeddings:
        yield Entry(head_name(config), (vocab, hidden), stored, "lm_head.weight")


def main_dtype(config: K3Config) -> torch.dtype:
    """Of everything that is neither packed nor kept in float32."""
    return getattr(torch, config.dtype)


def head_name(config: K3Config) -> str:
    """The output head stands beside ``model.``, not under it."""
    return "language_model.lm_head.weight" if config.family == "kimi_k3" else "lm_head.weight"


def layer_entries(config: K3Config, layer: int) -> Iterator[Entry]:
    """One layer, names relative to it."""
    stored = main_dtype(config)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield Entry(f"{name}.weight", (config.hidden_size,), stored, f"{name}.weight")
    if config.attn_res_block_size:
        yield from depth_mix(config, "self_attention_res")
        yield from depth_mix(config, "mlp_res")
    attention = kda_entries if config.is_kda(layer) else mla_entries
    for entry in attention(config):
        yield entry.under("self_attn", "self_attn")
    if config.is_moe(layer):
        for entry in moe_entries(config):
            yield entry.under("block_sparse_moe", "ffn")
    else:
        for entry in mlp_entries(config, config.intermediate_size):
            yield entry.under("mlp", "ffn")


def depth_mix(config: K3Config, name: str) -> Iterator[Entry]:
    """The gain and the one-row projection of an AttnRes site."""
    hidden, stored = config.hidden_size, main_dtype(config)
    yield Entry(f"{name}_norm.weight", (hidden,), stored, f"{name}.norm")
    yield Entry(f"{name}_proj.weight", (1, hidden), stored, f"{name}.proj")


def kda_entries(config: K3Config) -> Iterator[Entry]:
    """The linear attention: q, k and v are packed in the model and apart in the file."""
    hidden, heads, width = config.hidden_size, config.kda_num_heads, config.kda_head_dim
    inner, stored = heads * width, main_dtype(config)
    for part, letter in enumerate("qkv"):
        rows = slice(part * inner, (part + 1) * inner)
        yield Entry(f"{letter}_proj.weight", (inner, hidden), stored, "qkv_proj.weight", rows)
        yield Entry(f"{letter}_conv1d.weight", (inner, 1, 4), torch.float32, "conv_weight", rows)
    padded = (-(-heads // A_LOG_PAD) * A_LOG_PAD,) if config.family == "kimi_k3" else (1, 1, heads, 1)
    yield Entry("A_log", padded, torch.float32, "a_log", reshaped=True)
    yield Entry("dt_bias", (inner,), torch.float32, "dt_bias")
    yield Entry("f_a_proj.weight", (width, hidden), stored, "f_a_proj.weight")
    yield Entry("f_b_proj.weight", (inner, width), stored, "f_b_proj.weight")
    yield Entry("b_proj.weight", (heads, hidden), stored, "b_proj.weight")
    if config.use_full_rank_gate:
        yield Entry("g_proj.weight", (inner, hidden), stored, "g_proj.weight")
    else:
        yield Entry("g_a_proj.weight", (width, hidden), stored, "g_proj.0.weight")
        yield Entry("g_b_proj.weight", (inner, width), stored, "g_proj.1.weight")
    yield Entry("o_norm.weight", (width,), torch.float32, "o_norm")
    yield Entry("o_proj.weight", (hidden, inner), stored, "o_proj.weight")


def mla_entries(config: K3Config) -> Iterator[Entry]:
    """The latent attention."""
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    rank, stored = config.q_lora_rank, main_dtype(config)
    if rank:
        yield Entry("q_a_proj.weight", (rank, hidden), stored, "q_proj.0.weight")
        yield Entry("q_a_layernorm.weight", (rank,), stored, "q_proj.1.weight")
        yield Entry("q_b_proj.weight", (heads * (nope + rope), rank), stored, "q_proj.2.weight")
    else:
        yield Entry("q_proj.weight", (heads * (nope + rope), hidden), stored, "q_proj.weight")
    for name, shape in (
        ("kv_a_proj_with_mqa.weight", (latent + rope, hidden)),
        ("kv_a_layernorm.weight", (latent,)),
        ("kv_b_proj.weight", (heads * (nope + value), latent)),
        ("o_proj.weight", (hidden, heads * value)),
    ):
        yield Entry(name, shape, stored, name)
    if config.mla_use_output_gate:
        yield Entry("g_proj.weight", (heads * value, hidden), stored, "g_proj.weight")


def mlp_entries(config: K3Config, inner: int) -> Iterator[Entry]:
    """A dense MLP, or the fused shared experts."""
    hidden, stored = config.hidden_size, main_dtype(config)
    for name in ("gate_proj.weight", "up_proj.weight"):
        yield Entry(name, (inner, hidden), stored, name)
    yield Entry("down_proj.weight", (hidden, inner), stored, "down_proj.weight")


def moe_entries(config: K3Config) -> Iterator[Entry]:
    """Router, latent projections, shared MLP and every expert."""
    hidden, latent, stored = (
        config.hidden_size,
        config.routed_expert_hidden_size,
        main_dtype(config),
    )
    num, bias = config.num_experts, "e_score_correction_bias"
    yield Entry("gate.weight", (num, hidden), stored, "gate")
    yield Entry(f"gate.{bias}", (num,), torch.float32, bias)
    if latent:
        yield Entry(
            "routed_expert_down_proj.weight", (latent, hidden), stored, "routed_expert_down_proj.weight"
        )
        yield Entry("routed_expert_norm.weight", (latent,), stored, "routed_expert_norm.weight")
        yield Entry("routed_expert_up_proj.weight", (hidden, latent), stored, "routed_expert_up_proj.weight")
    for entry in mlp_entries(config, config.shared_intermediate_size):
        yield entry.under("shared_experts", "shared_experts")
    inner, width = config.moe_intermediate_size, config.latent_size
    for expert in range(num):
        for matrix, rows, columns in (("w1", inner, width), ("w2", width, inner), ("w3", inner, width)):
            name, parameter = f"experts.{expert}.{matrix}.weight", f"experts.{matrix}"
            if not config.experts_packed:
                yield Entry(name, (rows, columns), stored, parameter, expert)
                continue
            packed, scales = (rows, columns // 2), (rows, columns // GROUP)
            yield Entry(f"{name}_packed", packed, torch.uint8, parameter, expert)
            yield Entry(f"{name}_scale", scales, torch.uint8, f"{parameter}_scale", expert)
