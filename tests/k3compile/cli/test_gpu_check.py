"""`k3 gpu-check` says what it needs, writes its JSON, and ends with 0 only where all was right."""

import json

import pytest
import torch
from k3compile.kernels import jit_triton

from k3compile.cli.gpu_check import gpu_check
from k3compile.gpu_check import run

MADE = {
    "schema": run.SCHEMA, "mode": "gpu", "card": "a card", "part": None, "driver": None, "torch": "2",
    "triton": "3", "seconds": 1.0, "ops": [], "not_reached": [], "passed": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def with_triton(monkeypatch):
    monkeypatch.setattr(jit_triton, "installed", lambda: True)


def test_without_a_gpu_it_says_what_there_is_instead(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"sees no GPU on this machine; k3 gpu-check --interpret"):
        gpu_check()


def test_misuse_is_told(monkeypatch):
    with pytest.raises(ValueError, match=r"no op with a Triton kernel has 'nobody' .* there are rms_norm, "):
        gpu_check(match="nobody")
    monkeypatch.setattr(jit_triton, "installed", lambda: False)
    with pytest.raises(ValueError, match="pip install triton"):
        gpu_check()


def test_the_json_is_written_and_printed(monkeypatch, tmp_path, capsys):
    asked = []
    monkeypatch.setattr(run, "interpreted", lambda *a: asked.append(a) or MADE)
    assert gpu_check(tmp_path / "out.json", interpret=True, match="norm", seconds=9, as_json=True) == 0
    assert asked == [("norm", 9, True)]
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "out.json").read_text()) == MADE


@pytest.mark.parametrize(("interpret", "seconds"), [(False, 240.0), (True, 3600.0)])
def test_there_is_more_time_where_kernels_are_interpreted(monkeypatch, interpret, seconds):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run, "interpreted", lambda *a: asked.append(a) or MADE)
    monkeypatch.setattr(run, "run", lambda device, *a, **k: asked.append(a) or MADE)
    assert gpu_check(interpret=interpret) == 0
    assert asked == [("", seconds, True)]


def test_on_a_gpu_it_runs_here_and_a_complaint_is_code_1(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    wrong = MADE | {"not_reached": ["situ@decode"], "passed": False}
    monkeypatch.setattr(run, "run", lambda device, *a, **k: wrong if device == "cuda" else None)
    assert gpu_check() == 1
    assert "no time was left for situ@decode" in capsys.readouterr().out
