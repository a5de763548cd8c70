"""Loading a checkpoint for the verbs: said early, said clearly."""

import json
import logging
import subprocess
import sys

import pytest
import torch
from k3compile.runtime.checkpoint import make_checkpoint
from k3compile.runtime.engine_config import EngineConfig
from k3compile.runtime.tokenizer_train import train_bpe

from k3compile.cli import loading
from k3compile.cli.loading import (
    RankFormatter,
    check_checkpoint,
    check_device,
    drafts_of,
    load,
    load_weights,
    log_to_stderr,
    or_shipped,
)


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


def test_a_device_is_known_and_there(monkeypatch):
    check_device("cpu")
    with pytest.raises(ValueError, match="device is 'tpu'; allowed: cpu, cuda"):
        check_device("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"device is 'cuda', and torch \S+ sees no GPU on this machine"):
        check_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_device("cuda")


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


OTHER_RANK = """
import logging, warnings
from k3compile.cli.loading import log_to_stderr
log_to_stderr("debug", 3)
logging.info("not from here")
logging.warning("two\\nlines")
warnings.warn("a library says")
raise RuntimeError("the end")
"""


def test_of_another_rank_there_are_only_warnings_and_each_line_has_its_number():
    done = subprocess.run([sys.executable, "-c", OTHER_RANK], capture_output=True, text=True, timeout=60)
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert len(lines) > 6
    assert all(line.startswith("[rank 3] ") for line in lines), done.stderr
    for said in ("WARNING root: two", "[rank 3] lines", "a library says", "RuntimeError: the end"):
        assert said in done.stderr
    assert "not from here" not in done.stderr


def test_rank_0_speaks_as_one_process_does():
    record = logging.LogRecord("name", logging.INFO, "file", 1, "two\nlines", (), None)
    assert RankFormatter("").format(record).endswith("INFO name: two\nlines")


def test_progress_is_told_while_weights_are_read(tiny):
    told = []

    class Alone:
        rank = 0

        def progress(self, done, total):
            told.append((done, total))

    weights = load_weights(tiny, EngineConfig(), meeting=Alone())
    assert weights.draft is None
    done, totals = zip(*told)
    assert list(done) == sorted(done)
    assert len(told) > 10
    assert set(totals) == {done[-1]}
