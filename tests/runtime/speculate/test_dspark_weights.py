"""A draft's folder: what was written is read back, and what is wrong is listed."""

import json

import pytest
import torch
from draft_reference import small_draft, small_draft_json
from k3compile.runtime.config import ConfigError
from k3compile.runtime.speculate.dspark_checkpoint import write_draft
from k3compile.runtime.speculate.dspark_layout import SHARED
from k3compile.runtime.speculate.dspark_weights import has_draft, load_draft, tensors_of
from k3compile.runtime.weights import CheckpointError
from safetensors.torch import load_file, save_file
from small_models import SMALL

EMBEDDING = torch.randn(SMALL.vocab_size, SMALL.hidden_size)


@pytest.fixture
def written(tmp_path):
    write_draft(tmp_path / "draft", small_draft_json(SMALL), tensors_of(small_draft(SMALL), EMBEDDING))
    return tmp_path / "draft"


def test_a_draft_survives_being_written_and_read(written, tmp_path):
    draft, model = small_draft(SMALL), load_draft(written, SMALL)
    assert has_draft(tmp_path)
    assert not has_draft(written)
    assert model.config == draft.config
    for (name, mine), (_, theirs) in zip(model.named_parameters(), draft.named_parameters(), strict=True):
        assert mine.dtype == torch.float32
        assert torch.equal(mine, theirs.bfloat16().float()), name
    again = tensors_of(model, EMBEDDING)
    stored = load_file(written / "model.safetensors")
    assert again.keys() == stored.keys()
    assert all(torch.equal(again[name], stored[name]) for name in stored)
    assert all(tensor.dtype == torch.bfloat16 for tensor in stored.values())
    assert torch.equal(stored[SHARED], EMBEDDING.bfloat16())


def test_the_matrices_may_stay_in_bfloat16(written):
    model = load_draft(written, SMALL, torch.float32, torch.bfloat16)
    assert model.kv_a_proj.dtype == torch.bfloat16
    assert model.context_norm.weight.dtype == torch.float32


def test_everything_that_is_wrong_with_the_tensors_is_listed(written):
    tensors = load_file(written / "model.safetensors")
    del tensors["layers.1.self_attn.kv_a_layernorm.weight"]
    tensors["lm_head.weight"] = torch.zeros(2, 2, dtype=torch.bfloat16)
    tensors["final_norm.weight"] = torch.zeros(3, dtype=torch.bfloat16)
    tensors["context_norm.weight"] = tensors["context_norm.weight"].float()
    save_file(tensors, written / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_draft(written, SMALL)
    text = "\n".join(caught.value.problems)
    assert "layers.1.self_attn.kv_a_layernorm.weight [14] is missing" in text
    assert "lm_head.weight in model.safetensors is not a tensor of this model" in text
    assert "final_norm.weight has shape [3]" in text
    assert "context_norm.weight is torch.float32" in text
    assert len(caught.value.problems) == 4


def test_values_no_draft_has_are_refused(written):
    tensors = load_file(written / "model.safetensors")
    tensors["final_norm.weight"][0] = torch.nan
    save_file(tensors, written / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"final_norm\.weight holds NaN"):
        load_draft(written, SMALL)


def test_a_draft_of_another_target_is_refused(written):
    raw = json.loads((written / "config.json").read_text())
    (written / "config.json").write_text(json.dumps(raw | {"target_num_hidden_layers": 15}))
    with pytest.raises(ConfigError, match="belongs to another model"):
        load_draft(written, SMALL)
