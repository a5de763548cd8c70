"""Names, shapes and bytes of the release, to the tensor."""

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
import torch
from k3compile.runtime.config import K3Config
from k3compile.runtime.layout import entries, expected_tensors
from k3compile.runtime.model import Model
from small_models import SMALL, SMALL_LINEAR

RELEASED = K3Config.from_file(Path(__file__).parent.parent / "data" / "kimi-k3-config.json")
VISION_TENSORS, VISION_BYTES = 168, 894_717_952


def num_bytes(shape, dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


@pytest.fixture(scope="module")
def released():
    return expected_tensors(RELEASED)


def test_the_release_has_its_number_of_tensors_and_bytes(released):
    total = sum(num_bytes(*tensor) for tensor in released.values())
    assert len(released) == 497_052
    assert total == 1_559_965_606_912
    assert len(released) + VISION_TENSORS == 497_220
    assert total + VISION_BYTES == 1_560_860_324_864


def test_the_model_holds_those_bytes_but_for_the_padding_of_a_log(released):
    model = Model(RELEASED, torch.bfloat16, "meta")
    held = sum(p.numel() * p.dtype.itemsize for p in model.parameters())
    assert held == 1_559_965_606_912 - 69 * (128 - 96) * 4


def test_released_names_shapes_and_dtypes(released):
    bf16, f32, u8 = torch.bfloat16, torch.float32, torch.uint8
    kda = "language_model.model.layers.1.self_attn"
    mla = "language_model.model.layers.92.self_attn"
    moe = "language_model.model.layers.1.block_sparse_moe"
    known = {
        "language_model.lm_head.weight": ((163840, 7168), bf16),
        "language_model.model.embed_tokens.weight": ((163840, 7168), bf16),
        "language_model.model.output_attn_res_proj.weight": ((1, 7168), bf16),
        "language_model.model.layers.0.mlp.down_proj.weight": ((7168, 33792), bf16),
        "language_model.model.layers.92.self_attention_res_norm.weight": ((7168,), bf16),
        f"{kda}.v_conv1d.weight": ((12288, 1, 4), f32),
        f"{kda}.A_log": ((128,), f32),
        f"{kda}.dt_bias": ((12288,), f32),
        f"{kda}.f_b_proj.weight": ((12288, 128), bf16),
        f"{kda}.g_proj.weight": ((12288, 7168), bf16),
        f"{kda}.o_norm.weight": ((128,), f32),
        f"{mla}.q_b_proj.weight": ((18432, 1536), bf16),
        f"{mla}.kv_a_proj_with_mqa.weight": ((576, 7168), bf16),
        f"{mla}.kv_b_proj.weight": ((24576, 512), bf16),
        f"{moe}.gate.e_score_correction_bias": ((896,), f32),
        f"{moe}.routed_expert_norm.weight": ((3584,), bf16),
        f"{moe}.shared_experts.down_proj.weight": ((7168, 6144), bf16),
        f"{moe}.experts.895.w1.weight_packed": ((3072, 1792), u8),
        f"{moe}.experts.0.w3.weight_scale": ((3072, 112), u8),
        f"{moe}.experts.7.w2.weight_packed": ((3584, 1536), u8),
        f"{moe}.experts.7.w2.weight_scale": ((3584, 96), u8),
    }
    assert {name: released.get(name) for name in known} == known
    assert not any("layers.0.block_sparse_moe" in name or "layers.1.mlp." in name for name in released)


def test_tensors_a_layer_and_kind(released):
    parts = Counter(tuple(name.split(".")[3:5]) for name in released if ".layers." in name)
    assert parts["0", "self_attn"] == 14
    assert parts["3", "self_attn"] == 8
    assert parts["0", "mlp"] == 3
    assert parts["1", "block_sparse_moe"] == 8 + 896 * 6


TIED = dataclasses.replace(SMALL, tie_word_embeddings=True)
FULL_RANK = dataclasses.replace(SMALL, q_lora_rank=0)


@pytest.mark.parametrize("config", [SMALL, SMALL_LINEAR, TIED, FULL_RANK])
def test_every_value_of_the_model_is_covered_exactly_once(config):
    model = Model(config, torch.float32)
    for parameter in model.parameters():
        parameter.zero_()
    parameters = dict(model.named_parameters())
    for entry in entries(config):
        part = parameters[entry.parameter]
        part = part if entry.index is None else part[entry.index]
        assert part.numel() == torch.Size(entry.shape).numel() or entry.name.endswith("A_log")
        part += 1
    assert all(bool((parameter == 1).all()) for parameter in model.parameters())


def test_kimi_linear_keeps_its_own_names():
    names = expected_tensors(SMALL_LINEAR)
    assert names["model.layers.0.self_attn.A_log"] == ((1, 1, 3, 1), torch.float32)
    assert names["model.layers.3.self_attn.q_proj.weight"] == ((32, 32), torch.bfloat16)
    assert names["model.layers.0.self_attn.g_a_proj.weight"] == ((8, 32), torch.bfloat16)
    assert names["model.layers.1.block_sparse_moe.experts.7.w2.weight"] == ((32, 32), torch.bfloat16)
    assert "lm_head.weight" in names
    assert not any("res_norm" in name or "routed_expert" in name for name in names)
