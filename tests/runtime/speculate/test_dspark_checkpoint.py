"""Drafts made beside made checkpoints."""

import hashlib
import json
import re

import pytest
import torch
from draft_reference import small_draft, small_draft_json
from k3compile.runtime.checkpoint import make_checkpoint
from k3compile.runtime.config import ConfigError, K3Config
from k3compile.runtime.speculate.dspark_checkpoint import check_preset, make_draft, write_draft
from k3compile.runtime.speculate.dspark_layout import SHARED, entries, num_parameters
from k3compile.runtime.speculate.dspark_weights import load_draft, tensors_of
from k3compile.runtime.weights import load_model
from safetensors.torch import load_file
from small_models import SMALL


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = make_checkpoint(tmp_path_factory.mktemp("k3") / "tiny")
    make_draft(path)
    return path


def test_names_shapes_and_dtypes_are_those_of_the_layout(tiny):
    assert sorted(p.name for p in (tiny / "draft").iterdir()) == ["config.json", "model.safetensors"]
    draft = load_draft(tiny / "draft", K3Config.from_file(tiny))
    stored = load_file(tiny / "draft" / "model.safetensors")
    wanted = {entry.name: (entry.shape, entry.dtype) for entry in entries(draft.config)}
    assert {name: (tuple(t.shape), t.dtype) for name, t in stored.items()} == wanted
    assert len(stored) == 8 + 12 * 2
    assert num_parameters(draft.config) == 533_569


def test_the_shared_embedding_is_the_targets(tiny):
    stored = load_file(tiny / "draft" / "model.safetensors")
    target = load_model(tiny, dtype=torch.float64)
    assert torch.equal(stored[SHARED].double(), target.embed_tokens)


def test_the_same_seed_gives_the_same_bytes_and_the_target_stays_as_it_was(tiny, tmp_path):
    again = make_checkpoint(tmp_path / "k3")
    before = {p.name: p.stat().st_mtime_ns for p in again.glob("*")}
    lines = []
    make_draft(again, lines.append)
    make_draft(again, lines.append)
    assert lines == ["wrote draft/model.safetensors"]
    assert {p.name: p.stat().st_mtime_ns for p in again.glob("*") if p.name != "draft"} == before
    for name in ("config.json", "model.safetensors"):
        digests = {hashlib.sha256((p / "draft" / name).read_bytes()).hexdigest() for p in (again, tiny)}
        assert len(digests) == 1
    load_model(again)  # a folder in it disturbs nobody


def test_a_folder_that_was_not_made_and_a_preset_without_a_draft_are_refused(tmp_path):
    with pytest.raises(ValueError, match=re.escape("has no make-checkpoint.json")):
        make_draft(tmp_path)
    with pytest.raises(ValueError, match="preset 'small' has no DSpark draft; there is one for tiny"):
        check_preset("small")
    (tmp_path / "make-checkpoint.json").write_text(json.dumps({"preset": "small", "seed": 0}))
    with pytest.raises(ValueError, match="preset 'small' has no DSpark draft"):
        make_draft(tmp_path)


def test_nothing_is_written_that_could_not_be_read(tmp_path):
    tensors = tensors_of(small_draft(SMALL), torch.zeros(SMALL.vocab_size, SMALL.hidden_size))
    with pytest.raises(ConfigError):
        write_draft(tmp_path / "draft", small_draft_json(SMALL, markov_rank=0), tensors)
    short = dict(list(tensors.items())[1:])
    with pytest.raises(ValueError, match=r"not those of the configuration: context_proj\.weight"):
        write_draft(tmp_path / "draft", small_draft_json(SMALL), short)
    assert not (tmp_path / "draft").exists()
