"""The verb makes what the runtime makes, says so, and takes its mistakes as a sentence and code 2."""

import pytest
from k3compile.runtime.config import K3Config
from k3compile.runtime.speculate.dspark_weights import load_draft
from k3compile.runtime.weights import load_model

from k3compile.cli.main import main


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["make-checkpoint", *arguments])
    return left.value.code


def test_it_writes_a_checkpoint_and_prints_progress(tmp_path, capsys):
    assert run("--preset", "tiny-linear", "--seed", "3", str(tmp_path / "made")) == 0
    out = capsys.readouterr().out
    assert "wrote model-00001-of-000002.safetensors" in out
    assert "187 tensors" in out
    assert load_model(tmp_path / "made").config.family == "kimi_linear"


def test_a_wrong_preset_or_a_foreign_folder_is_one_line_and_code_2(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert run(str(tmp_path)) == 2
    assert "not empty" in capsys.readouterr().err
    assert run("--preset", "large", str(tmp_path / "new")) == 2
    assert "there are tiny, small, tiny-linear" in capsys.readouterr().err


def test_a_draft_comes_along_when_it_is_asked_for(tmp_path, capsys):
    assert run("--preset", "tiny-linear", "--draft", str(tmp_path / "none")) == 2
    assert "preset 'tiny-linear' has no DSpark draft; there is one for tiny" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    assert run("--draft", str(tmp_path / "made")) == 0
    assert "wrote draft/model.safetensors" in capsys.readouterr().out
    assert load_draft(tmp_path / "made" / "draft", K3Config.from_file(tmp_path / "made")).layers
