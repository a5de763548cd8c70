"""Each field is read or refused, and every complaint about a file comes at once."""

import copy
import json
from pathlib import Path

import pytest
from k3compile.runtime.config import ConfigError, K3Config

RELEASED = json.loads((Path(__file__).parent.parent / "data" / "kimi-k3-config.json").read_text())


def changed(**text) -> dict:
    raw = copy.deepcopy(RELEASED)
    raw["text_config"] |= text
    return raw


def problems(raw: dict) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        K3Config.from_dict(raw)
    return caught.value.problems


def test_every_complaint_comes_in_one_error():
    raw = changed(
        hidden_size=-1,
        hidden_act="relu",
        topk_method="greedy",
        num_expert_group=8,
        mla_use_nope=False,
        num_nextn_predict_layers=1,
        rope_scaling={"factor": 2},
        num_experts_per_token=1000,
        sliding_windw=3,
    )
    del raw["text_config"]["v_head_dim"]
    found = problems(raw)
    for word in ("hidden_size", "hidden_act", "topk_method", "num_expert_group", "mla_use_nope", "num_nextn"):
        assert any(word in line for line in found), word
    assert any("v_head_dim is missing" in line for line in found)
    assert any("rope_scaling" in line and "no positional encoding" in line for line in found)
    assert any("1000 is more than num_experts 896" in line for line in found)
    assert any("did you mean 'sliding_window'" in line for line in found)
    assert len(found) == 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"full_attn_layers": [0, 4]}, "counts from 1"),
        ({"full_attn_layers": [*range(4, 93, 4), 93, 94]}, "goes past num_hidden_layers 93 with [94]"),
        ({"full_attn_layers": [1, *range(4, 93, 4), 93]}, "names twice [1]"),
        ({"full_attn_layers": [*range(4, 93, 4)]}, "leaves out [93]"),
        ({"full_attn_layers": "4,8"}, "a list of whole numbers"),
        ({"gate_lower_bound": -6.0}, "must lie in [-5, 0)"),
        ({"gate_lower_bound": 1.0}, "must lie in [-5, 0)"),
        ({"gate_lower_bound": None}, "gate_lower_bound is missing"),
        ({"short_conv_kernel_size": 3}, "must be 4"),
        ({"chunk": 3}, "is not a field we know"),
    ],
)
def test_the_linear_attention_section_is_checked(change, message):
    raw = changed()
    raw["text_config"]["linear_attn_config"] |= change
    assert any(message in line for line in problems(raw))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8, and must be 96"),
        ({"hidden_act": "silu"}, "activation_situ_beta says otherwise"),
        ({"activation_situ_linear_beta": None}, "needs both"),
        ({"latent_moe_use_norm": False}, "latent_moe_use_norm is False"),
        ({"moe_intermediate_size": 3000}, "MXFP4 experts need a multiple of 32"),
        ({"eos_token_id": 163840}, "outside the vocabulary"),
        ({"eos_token_id": 5}, "eos_token_id is 5 in"),
        ({"rms_norm_eps": 0}, "a positive number"),
        ({"hidden_size": True}, "a whole number"),
        ({"num_experts": 10**8}, "at most 16384 are loaded"),
        ({"dtype": "int8"}, "'bfloat16' or 'float16' or 'float32'"),
    ],
)
def test_contradictions_are_named(change, message):
    assert any(message in line for line in problems(changed(**change)))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["format"], "nvfp4-pack-quantized", "'mxfp4-pack-quantized'"),
        (["quant_method"], "gptq", "'compressed-tensors'"),
        (["kv_cache_scheme"], {"num_bits": 8}, "kv_cache_scheme"),
        (["config_groups", "group_0", "weights", "group_size"], 16, "group_size is 16"),
        (["config_groups", "group_0", "weights", "type"], "int", "type is 'int'"),
        (["config_groups", "group_0", "input_activations"], {"num_bits": 8}, "only weights are quantised"),
        (["config_groups"], {}, "an object with one group"),
        (["config_groups", "group_0", "weights"], {}, "weights.num_bits is missing"),
        (["config_groups", "group_0", "weights", "actorder"], "group", "actorder is 'group'"),
        (["config_groups", "group_0", "weights", "zp_dtype"], "torch.int8", "zp_dtype"),
        (["config_groups", "group_0", "weights", "block_structure"], [128, 128], "block_structure"),
        (
            ["config_groups", "group_0", "weights", "transpose"],
            True,
            "transpose = True is not a field we know",
        ),
        (
            ["config_groups", "group_0", "rotation"],
            "hadamard",
            "rotation = 'hadamard' is not a field we know",
        ),
        (["sparsity_config"], {"format": "sparse-24-bitmask"}, "sparsity_config"),
        (["transform_config"], {"u": {}}, "transform_config"),
    ],
)
def test_only_the_released_quantisation_is_run(path, value, message):
    raw = copy.deepcopy(RELEASED)
    section = raw["text_config"]["quantization_config"]
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    assert any(message in line for line in problems(raw))


def test_empty_extras_of_a_quantisation_section_are_no_complaint():
    raw = copy.deepcopy(RELEASED)
    raw["text_config"]["quantization_config"] |= {
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.13",
    }
    assert K3Config.from_dict(raw).experts_packed


def test_an_empty_section_is_missing_every_field():
    found = problems(changed(linear_attn_config={}))
    for name in ("kda_layers", "full_attn_layers", "num_heads", "head_dim", "short_conv_kernel_size"):
        assert f"text_config.linear_attn_config.{name} is missing" in found


def test_the_quantisation_section_may_also_stand_at_the_top():
    raw = copy.deepcopy(RELEASED)
    raw["quantization_config"] = raw["text_config"].pop("quantization_config")
    assert K3Config.from_dict(raw).experts_packed
    raw["text_config"]["quantization_config"] = {"format": "other"}
    assert any("outside it" in line for line in problems(raw))


@pytest.mark.parametrize(
    ("outer", "inner", "tied"),
    [
        (None, None, False),
        (True, None, True),
        (False, None, False),
        (None, True, True),
        (None, False, False),
        (True, False, False),
        (False, True, True),
        (True, True, True),
        (False, False, False),
    ],
)
def test_the_text_models_own_tie_flag_wins(outer, inner, tied):
    raw = copy.deepcopy(RELEASED)
    for holder, flag in ((raw, outer), (raw["text_config"], inner)):
        holder.pop("tie_word_embeddings")
        if flag is not None:
            holder["tie_word_embeddings"] = flag
    assert K3Config.from_dict(raw).tie_word_embeddings is tied


def test_other_models_are_refused_with_the_two_names():
    assert any("'kimi_k3' or 'kimi_linear'" in line for line in problems({"model_type": "llama"}))


def test_a_mistyped_depth_is_refused_without_naming_every_layer():
    line = next(line for line in problems(changed(num_hidden_layers=1_000_000)) if "leaves out" in line)
    assert "94" in line
    assert len(line) < 2000
