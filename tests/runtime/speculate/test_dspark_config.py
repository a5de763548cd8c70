"""The draft's config.json: the released one is read, and whatever is wrong is said at once."""

import json

import pytest
from draft_reference import DSPARK_JSON, small_draft_json
from k3compile.runtime.config import ConfigError, K3Config
from k3compile.runtime.presets import DRAFTS, PRESETS, config_json, draft_config_json
from k3compile.runtime.speculate.dspark_config import DSparkConfig
from small_models import SMALL

RELEASED = json.loads(DSPARK_JSON.read_text())


def problems(raw, target=None):
    with pytest.raises(ConfigError) as caught:
        DSparkConfig.from_dict(raw, target)
    return caught.value.problems


def test_the_released_configuration_is_read():
    config = DSparkConfig.from_dict(RELEASED)
    assert config.target_layer_ids == (2, 23, 47, 71, 89)
    assert (config.num_attention_heads, config.head_width, config.row) == (64, 192, 576)
    assert config.softmax_scale == pytest.approx(0.1308608, abs=5e-8)
    assert config.block_size == 7  # what it is published with; the file does not say


def test_the_tiny_draft_has_the_sizes_of_the_design():
    target = K3Config.from_dict(config_json(PRESETS["tiny"]))
    config = DSparkConfig.from_dict(draft_config_json(PRESETS["tiny"], DRAFTS["tiny"]), target)
    assert (config.num_hidden_layers, config.num_attention_heads, config.intermediate_size) == (2, 8, 256)
    assert (config.q_lora_rank, config.kv_lora_rank, config.v_head_dim) == (48, 32, 16)
    assert (config.qk_nope_head_dim, config.qk_rope_head_dim) == (16, 8)
    assert (config.markov_rank, config.block_size, config.mask_token_id) == (32, 8, 1021)
    assert config.target_layer_ids == (1, 4, 7)
    assert config.yarn == DSparkConfig.from_dict(RELEASED).yarn


def test_every_wrong_field_is_named_at_once():
    raw = small_draft_json(SMALL) | {
        "model_type": "llama",
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "num_key_value_heads": 1,
        "draft_vocab_size": 5,
        "num_target_layers": 9,
        "markov_head_type": "gated",
        "enable_confidence_head": False,
        "hidden_act": "gelu",
        "qk_rope_head_dim": 7,
        "mask_token_id": 1000,
        "rms_norm_eps": -1,
        "markov_rnak": 8,
        "rope_scaling": {"type": "yarn"},
    }
    text = "\n".join(problems(raw))
    for name in ("model_type is 'llama'", "mla_use_nope is True", "mla_use_output_gate is True"):
        assert name in text
    for name in ("num_key_value_heads is 1", "draft_vocab_size is 5", "num_target_layers is 9"):
        assert name in text
    for name in ("markov_head_type", "enable_confidence_head", "hidden_act", "must be even"):
        assert name in text
    assert "mask_token_id 1000 is outside the vocabulary of 96" in text
    assert "rms_norm_eps is -1" in text
    assert "did you mean 'markov_rank'?" in text
    assert "rope_scaling" in text
    assert len(text.splitlines()) == 14


@pytest.mark.parametrize("name", sorted(RELEASED))
def test_a_missing_field_is_missed_or_has_no_meaning(name):
    raw = {key: value for key, value in RELEASED.items() if key != name}
    optional = {"architectures", "_torchspec_version", "torch_dtype", "tie_word_embeddings", "rope_theta"}
    optional |= {"bos_token_id", "eos_token_id", "pad_token_id", "num_key_value_heads", "draft_vocab_size"}
    optional |= {"mla_use_output_gate"}
    if name in optional:
        assert DSparkConfig.from_dict(raw) == DSparkConfig.from_dict(RELEASED)
    else:
        assert any(name in problem for problem in problems(raw))


def test_taps_must_rise_within_the_target():
    assert "rising order" in problems(small_draft_json(SMALL, target_layer_ids=[3, 2]))[0]
    assert "rising order" in problems(small_draft_json(SMALL, target_layer_ids=[]))[0]
    assert "go past" in problems(small_draft_json(SMALL, target_layer_ids=[3, 14]))[0]
    assert "must be target_hidden_size" in problems(small_draft_json(SMALL, hidden_size=48))[0]


def test_the_rope_section_is_checked():
    def with_rope(**changes):
        raw = small_draft_json(SMALL)
        return raw | {"rope_parameters": raw["rope_parameters"] | changes}

    assert "rope_parameters.rope_type is 'linear'" in problems(with_rope(rope_type="linear"))[0]
    assert "rope_parameters.factor is 0" in problems(with_rope(factor=0))[0]
    assert "beta_fast > beta_slow" in problems(with_rope(beta_fast=1))[0]
    assert "rope_theta is 50000.0" in problems(with_rope(rope_theta=10000.0))[0]
    assert "rope_parameters.turbo" in problems(with_rope(turbo=1))[0]
    assert "rope_parameters is missing" in problems(small_draft_json(SMALL, rope_parameters=None))[0]


def test_sizes_must_be_the_targets():
    config = DSparkConfig.from_dict(small_draft_json(SMALL), SMALL)
    assert config.hidden_size == SMALL.hidden_size
    other = K3Config.from_dict(config_json(PRESETS["tiny"]))
    found = problems(small_draft_json(SMALL), other)
    assert [p.split()[0] for p in found] == ["target_hidden_size", "target_num_hidden_layers", "vocab_size"]
    assert "this draft belongs to another model" in found[0]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        DSparkConfig.from_file(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        DSparkConfig.from_file(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(RELEASED | {"v_head_dim": 0}))
    with pytest.raises(ConfigError, match=r"config\.json:\n.*v_head_dim is 0"):
        DSparkConfig.from_file(tmp_path)
