"""The verb counts what is there and lists what is wrong."""

import json
from pathlib import Path

import pytest
from k3compile.runtime.checkpoint import make_checkpoint

from k3compile.cli.main import main

RELEASED = Path(__file__).parent.parent.parent / "data" / "kimi-k3-config.json"


def run(capsys, *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as left:
        main(["inspect", *arguments])
    return left.value.code, capsys.readouterr().out


def test_a_whole_checkpoint_is_counted_by_kind_of_layer(tmp_path, capsys):
    make_checkpoint(tmp_path / "tiny")
    code, out = run(capsys, str(tmp_path / "tiny"))
    assert code == 0
    assert "618 text tensors" in out
    assert "whole: every tensor" in out
    code, out = run(capsys, str(tmp_path / "tiny"), "--json")
    found = json.loads(out)
    assert code == 0
    assert found["bytes"] == 7_485_792
    assert {kind: part["count"] for kind, part in found["layers"].items()} == {
        "KDA + dense + snapshot": 1,
        "KDA + MoE": 4,
        "MLA + MoE": 3,
        "KDA + MoE + snapshot": 1,
    }


def test_problems_are_listed_and_give_code_1(tmp_path, capsys):
    make_checkpoint(tmp_path / "tiny")
    (tmp_path / "tiny" / "model-00002-of-000004.safetensors").unlink()
    code, out = run(capsys, str(tmp_path / "tiny"))
    assert code == 1
    assert "model-00002-of-000004.safetensors is missing" in out


@pytest.mark.slow
def test_the_released_configuration_alone_can_be_inspected(capsys):
    code, out = run(capsys, str(RELEASED), "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["tensors"], found["bytes"]) == (497_052, 1_559_965_606_912)
    assert found["layers"]["MLA + MoE"]["count"] == 24
    assert found["problems"] is None
