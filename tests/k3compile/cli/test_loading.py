"""Loading a checkpoint for the verbs: said early, said clearly."""

import json
import logging

import pytest
from k3compile.runtime.checkpoint import make_checkpoint
from k3compile.runtime.engine_config import EngineConfig
from k3compile.runtime.tokenizer_train import train_bpe

from k3compile.cli import loading
from k3compile.cli.loading import check_checkpoint, drafts_of, load, log_to_stderr, or_shipped


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("made") / "k3-tiny", "tiny", 0)


def test_what_is_no_folder_or_no_checkpoint_is_told(tmp_path):
    with pytest.raises(ValueError, match="k3 make-checkpoint --preset tiny"):
        check_checkpoint(tmp_path / "nothing")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="file is a file: give the folder"):
        check_checkpoint(tmp_path / "file")
    (tmp_path / "file").unlink()
    with pytest.raises(ValueError, match=r"has no config\.json and no tiktoken\.model"):
        check_checkpoint(tmp_path)


def test_no_folder_means_the_model_that_came_with_the_package(tmp_path, monkeypatch):
    assert or_shipped(str(tmp_path)) == tmp_path
    monkeypatch.setattr(loading, "SHIPPED", tmp_path)
    with pytest.raises(
        ValueError, match="the trained tiny model did not come with this installation: give a"
    ):
        or_shipped(None)
    (tmp_path / "config.json").write_text("{}")
    assert or_shipped(None) == tmp_path


def test_the_packages_own_model_drafts_unless_it_is_told_not_to(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "SHIPPED", tmp_path)
    assert drafts_of(None, tmp_path) == 0, "it has no draft"
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text(json.dumps({"block_size": 5}))
    assert [drafts_of(given, tmp_path) for given in (None, 0, 3)] == [5, 0, 3]
    assert [drafts_of(given, tmp_path / "other") for given in (None, 0, 3)] == [0, 0, 3]


def test_a_checkpoint_is_loaded_with_an_engine_that_is_not_started(tiny):
    model, engine, tokenizer, pools = load(tiny, EngineConfig(max_model_len=256))
    assert pools is engine.pools
    assert tokenizer.vocab_size == model.config.vocab_size == engine.vocab_size
    assert tokenizer.stop_id in engine.eos_ids
    assert engine.max_model_len == 256


def test_dtypes_are_named(tiny):
    for options in ({"dtype": "float16"}, {"resident": "int8"}):
        with pytest.raises(ValueError, match="allowed: float32, bfloat16, float64"):
            load(tiny, EngineConfig(), **options)


def test_a_tokenizer_of_another_size_is_refused(tiny, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for file in tiny.iterdir():
        if file.is_file():
            (other / file.name).symlink_to(file)
    (other / "tiktoken.model").unlink()
    (other / "tiktoken.model").write_bytes(train_bpe(None, 700))
    with pytest.raises(ValueError, match=r"the tokenizer has 956 ids, config\.json says 1024"):
        load(other, EngineConfig())
    (other / "config.json").unlink()
    (other / "config.json").write_text(json.dumps({"model_type": "gpt"}))
    with pytest.raises(ValueError, match="model_type"):
        load(other, EngineConfig())


def test_the_log_level_is_checked():
    with pytest.raises(ValueError, match="log-level is 'loud'"):
        log_to_stderr("loud")
    assert logging.root.level != "LOUD"
