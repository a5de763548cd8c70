"""The presets have the sizes the design gives, and read as complete configurations."""

import json
from pathlib import Path

import pytest
import torch
from k3compile.runtime.config import K3Config
from k3compile.runtime.layout import entries
from k3compile.runtime.presets import PRESETS, config_json

RELEASED = json.loads((Path(__file__).parent.parent / "data" / "kimi-k3-config.json").read_text())


def count(config: K3Config) -> tuple[int, int, int]:
    """Tensors, weights and bytes of a checkpoint; two weights in a packed byte, none in a scale."""
    tensors = weights = size = 0
    for entry in entries(config):
        num = torch.Size(entry.shape).numel()
        tensors, size = tensors + 1, size + num * entry.dtype.itemsize
        weights += 0 if entry.name.endswith("_scale") else num * (2 if entry.name.endswith("_packed") else 1)
    return tensors, weights, size


@pytest.mark.parametrize(
    ("name", "tensors", "weights", "size"),
    [
        ("tiny", 618, 6_042_128, 7_485_792),
        ("small", 2644, 439_248_000, 435_193_344),
        ("tiny-linear", 187, 723_996, 1_453_168),
    ],
)
def test_a_preset_has_its_size(name, tensors, weights, size):
    assert count(K3Config.from_dict(config_json(PRESETS[name]))) == (tensors, weights, size)


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_a_k3_preset_has_all_four_kinds_and_more_than_one_snapshot(name):
    config = K3Config.from_dict(config_json(PRESETS[name]))
    assert len({config.kind(i) for i in range(config.num_hidden_layers)}) == 4
    assert config.num_snapshots >= 2
    assert not config.is_kda(config.num_hidden_layers - 1)
    assert not config.is_kda(config.num_hidden_layers - 2)


def test_tiny_has_the_dimensions_of_the_design():
    config = K3Config.from_dict(config_json(PRESETS["tiny"]))
    assert [i + 1 for i in range(9) if not config.is_kda(i)] == [4, 8, 9]
    assert (config.attn_res_block_size, config.hidden_size, config.vocab_size) == (6, 128, 1024)
    assert (config.num_attention_heads, config.kda_num_heads, config.kda_head_dim) == (8, 8, 16)
    assert (config.q_lora_rank, config.kv_lora_rank) == (48, 32)
    assert (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim) == (16, 8, 16)
    assert (config.num_experts, config.num_experts_per_token, config.num_shared_experts) == (8, 2, 2)
    assert (config.latent_size, config.moe_intermediate_size, config.intermediate_size) == (64, 256, 512)


def test_control_ids_stand_at_the_released_offsets():
    for preset in PRESETS.values():
        config = K3Config.from_dict(config_json(preset))
        shift = 163840 - config.vocab_size
        assert config.bos_token_id == 163584 - shift
        assert config.eos_token_id == 163586 - shift
        assert config.pad_token_id == 163839 - shift


def test_a_k3_preset_has_every_field_of_the_released_text_model():
    made = config_json(PRESETS["tiny"])
    left_out = {"vision_config", "image_placeholder"}  # no vision tower is made
    assert set(made) == set(RELEASED) - left_out
    assert set(made["text_config"]) - {"transformers_version"} == set(RELEASED["text_config"])
    for section in ("linear_attn_config", "quantization_config"):
        assert set(made["text_config"][section]) == set(RELEASED["text_config"][section])
    assert made["text_config"]["quantization_config"] == RELEASED["text_config"]["quantization_config"]


def test_the_experts_of_the_linear_preset_are_not_packed():
    config = K3Config.from_dict(config_json(PRESETS["tiny-linear"]))
    assert config.family == "kimi_linear"
    assert not config.experts_packed
