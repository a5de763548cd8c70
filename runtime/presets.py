"""Sizes of the checkpoints that can be made without a hub, as complete ``config.json`` files.

    tiny          a K3 of 6 million parameters with every kind of layer     tests, first steps
    small         a K3 of 439 million                                       benchmarks
    tiny-linear   a Kimi-Linear of 0.7 million, experts in bfloat16         tests

Control ids stand in the last 256 places of the vocabulary, at the released offsets. A draft is made for tiny
alone: random drafts are never accepted, so they are for tests, and for training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MIB = 1 << 20
BOS, EOS, MEDIA_PAD, DRAFT_MASK, PAD = 0, 2, 21, 253, 255  # offsets among the control ids
NUM_CONTROL = 256


@dataclass(frozen=True)
class Preset:
    """One size: what differs between checkpoints of a family. Layer numbers count from 1, as in the file."""

    family: str
    layers: int
    mla_layers: tuple[int, ...]
    hidden: int
    heads: int
    kda_width: int
    kv_lora: int
    nope: int
    rope: int
    value: int
    experts: int
    top_k: int
    expert_width: int
    dense_width: int
    vocab: int
    shard_bytes: int
    shared: int = 2
    q_lora: int = 0
    latent: int = 0
    block: int = 0

    @property
    def ranks(self) -> int:
        """Tokens that are pieces of text, in front of the control tokens."""
        return self.vocab - NUM_CONTROL


PRESETS = {
    "tiny": Preset(
        family="kimi_k3",
        layers=9,
        mla_layers=(4, 8, 9),
        block=6,
        hidden=128,
        heads=8,
        kda_width=16,
        q_lora=48,
        kv_lora=32,
        nope=16,
        rope=8,
        value=16,
        experts=8,
        top_k=2,
        latent=64,
        expert_width=256,
        dense_width=512,
        vocab=1024,
        shard_bytes=2 * MIB,
    ),
    "small": Preset(
        family="kimi_k3",
        layers=13,
        mla_layers=(4, 8, 12, 13),
        block=5,
        hidden=1024,
        heads=8,
        kda_width=128,
        q_lora=384,
        kv_lora=256,
        nope=128,
        rope=64,
        value=128,
        experts=32,
        top_k=4,
        latent=512,
        expert_width=512,
        dense_width=4096,
        vocab=4096,
        shard_bytes=64 * MIB,
    ),
    "tiny-linear": Preset(
        family="kimi_linear",
        layers=5,
        mla_layers=(4, 5),
        hidden=64,
        heads=4,
        kda_width=16,
        kv_lora=32,
        nope=16,
        rope=8,
        value=16,
        experts=8,
        top_k=2,
        shared=1,
        expert_width=64,
        dense_width=256,
        vocab=1024,
        shard_bytes=1 * MIB,
    ),
}


@dataclass(frozen=True)
class DraftPreset:
    """The DSpark draft of a preset: what is not its target's. Tapped layers count from 0."""

    layers: int
    heads: int
    inner: int
    markov: int
    block: int
    taps: tuple[int, ...]


DRAFTS = {"tiny": DraftPreset(layers=2, heads=8, inner=256, markov=32, block=8, taps=(1, 4, 7))}


def draft_config_json(preset: Preset, draft: DraftPreset) -> dict[str, Any]:
    """The ``config.json`` of a draft, with every field of the released file and ``block_size``."""
    theta = 50000.0
    return {
        "architectures": ["K3DSparkModel"],
        "model_type": "k3_dspark",
        "hidden_size": preset.hidden,
        "intermediate_size": draft.inner,
        "num_hidden_layers": draft.layers,
        "num_attention_heads": draft.heads,
        "num_key_value_heads": draft.heads,
        "q_lora_rank": preset.q_lora,
        "kv_lora_rank": preset.kv_lora,
        "qk_nope_head_dim": preset.nope,
        "qk_rope_head_dim": preset.rope,
        "v_head_dim": preset.value,
        "mla_use_nope": False,
        "mla_use_output_gate": False,
        "vocab_size": preset.vocab,
        "rms_norm_eps": 1e-05,
        "max_position_embeddings": 1048576,
        "rope_theta": theta,
        "num_target_layers": len(draft.taps),
        "target_hidden_size": preset.hidden,
        "target_num_hidden_layers": preset.layers,
        "target_layer_ids": list(draft.taps),
        "mask_token_id": preset.ranks + DRAFT_MASK,
        **{name: preset.ranks + offset for name, offset in token_ids().items()},
        "markov_rank": draft.markov,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "block_size": draft.block,
        "tie_word_embeddings": False,
        "draft_vocab_size": preset.vocab,
        "torch_dtype": "bfloat16",
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 32768,
            "rope_theta": theta,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    }


def config_json(preset: Preset) -> dict[str, Any]:
    """The ``config.json`` of a preset, with every field of the released file that a text model has."""
    ids = {name: preset.ranks + offset for name, offset in token_ids().items()}
    if preset.family == "kimi_linear":
        named = {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear"}
        own = {"hidden_act": "silu", "q_lora_rank": None, "routed_scaling_factor": 2.446}
        # Three more of that file without a meaning here; other readers insist on them.
        unused = {"head_dim": preset.hidden // preset.heads, "rope_theta": 10000.0, "rope_scaling": None}
        text = shared_fields(preset)
        text["model_max_length"] = text.pop("max_position_embeddings")
        return named | text | own | unused | ids
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        **ids,
        "media_placeholder_token_id": preset.ranks + MEDIA_PAD,
        "ignore_index": -100,
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "kimi_linear",
            "architectures": ["KimiLinearForCausalLM"],
            **shared_fields(preset),
            **k3_fields(preset),
            **ids,
            "quantization_config": quantization(),
        },
    }


def token_ids() -> dict[str, int]:
    """Offsets of the three ids that a configuration names."""
    return {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}


def shared_fields(preset: Preset) -> dict[str, Any]:
    """What K3 and Kimi-Linear spell alike."""
    return {
        "vocab_size": preset.vocab,
        "hidden_size": preset.hidden,
        "num_hidden_layers": preset.layers,
        "intermediate_size": preset.dense_width,
        "rms_norm_eps": 1e-05,
        "initializer_range": 0.02,
        "max_position_embeddings": 1048576,
        "use_cache": True,
        "tie_word_embeddings": False,
        "num_attention_heads": preset.heads,
        "num_key_value_heads": preset.heads,
        "kv_lora_rank": preset.kv_lora,
        "qk_nope_head_dim": preset.nope,
        "qk_rope_head_dim": preset.rope,
        "v_head_dim": preset.value,
        "mla_use_nope": True,
        "linear_attn_config": {
            "num_heads": preset.heads,
            "head_dim": preset.kda_width,
            "short_conv_kernel_size": 4,
            "full_attn_layers": list(preset.mla_layers),
            "kda_layers": [i for i in range(1, preset.layers + 1) if i not in preset.mla_layers],
        },
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_experts": preset.experts,
        "num_experts_per_token": preset.top_k,
        "num_shared_experts": preset.shared,
        "moe_intermediate_size": preset.expert_width,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
        "dtype": "bfloat16",
        "transformers_version": "4.56.2",
    }


def k3_fields(preset: Preset) -> dict[str, Any]:
    """What only K3 has, or what it sets differently."""
    linear = shared_fields(preset)["linear_attn_config"]
    return {
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": preset.block,
        "q_lora_rank": preset.q_lora,
        "mla_use_output_gate": True,
        "linear_attn_config": linear | {"gate_lower_bound": -5.0, "use_full_rank_gate": True},
        "routed_expert_hidden_size": preset.latent,
        "latent_moe_use_norm": True,
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 1.0,
    }


def quantization() -> dict[str, Any]:
    """The released section: MXFP4 for what the ignore list leaves, which is more than is really packed."""
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "output_activations": None,
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "strategy": "group",
                    "group_size": 32,
                    "symmetric": True,
                    "dynamic": False,
                    "scale_dtype": "torch.uint8",
                    "observer": "minmax",
                    "actorder": None,
                    "block_structure": None,
                    "zp_dtype": None,
                },
            }
        },
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
        ],
    }
