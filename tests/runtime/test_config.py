"""The released config.json is read whole, and what we do not run is refused, all of it at once."""

import dataclasses
import json
from pathlib import Path

import pytest
from k3compile.runtime.config import ConfigError, K3Config

RELEASED = json.loads((Path(__file__).parent.parent / "data" / "kimi-k3-config.json").read_text())


def kimi_linear() -> dict:
    """The 48B model's file, with the boilerplate that Hugging Face tools add to it."""
    full = [4, 8, 12, 16, 20, 24, 27]
    return {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "vocab_size": 163840,
        "hidden_size": 2304,
        "num_hidden_layers": 27,
        "intermediate_size": 9216,
        "hidden_act": "silu",
        "head_dim": 72,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "model_max_length": 1048576,
        "tie_word_embeddings": False,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "linear_attn_config": {
            "full_attn_layers": full,
            "kda_layers": [i for i in range(1, 28) if i not in full],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1024,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "num_nextn_predict_layers": 0,
        "bos_token_id": 163584,
        "eos_token_id": 163586,
        "pad_token_id": 163839,
        "dtype": "bfloat16",
    }


def test_the_released_file_gives_k3s_schedule():
    config = K3Config.from_dict(RELEASED)
    mla = [i for i in range(93) if not config.is_kda(i)]
    assert mla == [*range(3, 92, 4), 92]
    assert [i for i in range(93) if config.is_snapshot(i)] == [0, 12, 24, 36, 48, 60, 72, 84]
    assert config.num_snapshots == 8
    assert [i for i in range(93) if not config.is_moe(i)] == [0]
    assert (config.latent_size, config.shared_intermediate_size) == (3584, 6144)
    assert (config.situ_beta, config.situ_linear_beta, config.gate_lower_bound) == (4.0, 25.0, -5.0)
    assert config.experts_packed
    assert not config.tie_word_embeddings
    assert config.eos_token_id == 163586


def test_k3_has_four_kinds_of_layer():
    config = K3Config.from_dict(RELEASED)
    assert {config.kind(i) for i in range(93)} == {
        ("kda", "dense", True),
        ("kda", "moe", False),
        ("kda", "moe", True),
        ("mla", "moe", False),
    }


def test_kimi_linear_reads_as_k3_with_parts_switched_off():
    config = K3Config.from_dict(kimi_linear())
    assert config.family == "kimi_linear"
    assert (config.q_lora_rank, config.attn_res_block_size, config.routed_expert_hidden_size) == (0, 0, 0)
    assert (config.gate_lower_bound, config.situ_beta) == (0.0, 0.0)
    assert not any((config.mla_use_output_gate, config.use_full_rank_gate, config.experts_packed))
    assert (config.latent_size, config.max_position_embeddings) == (2304, 1048576)
    assert config.routed_scaling_factor == 2.446


def test_a_changed_copy_is_checked_too():
    config = K3Config.from_dict(RELEASED)
    with pytest.raises(ValueError, match="more than num_experts"):
        dataclasses.replace(config, num_experts=8)


def test_a_file_that_cannot_be_read_says_which_and_why(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        K3Config.from_file(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        K3Config.from_file(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must be a JSON object"):
        K3Config.from_file(tmp_path / "config.json")
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        K3Config.from_file(tmp_path)


@pytest.mark.parametrize("eps", [0.0, -1e-6, float("nan"), float("inf")])
def test_the_latent_eps_must_be_a_positive_number(eps):
    with pytest.raises(ConfigError, match="latent_norm_eps"):
        K3Config.from_dict(RELEASED, latent_norm_eps=eps)
