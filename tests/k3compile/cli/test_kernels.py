"""`k3 kernels` compiles what is asked for and says no to what it does not know."""

import importlib.metadata
import json

import pytest
from k3compile.kernels import jit_triton

from k3compile.aot import table
from k3compile.cli import kernels as verb

pytest.importorskip("triton")


def test_one_call_for_one_part(capsys):
    assert verb.kernels(target="sm_90", match="situ@decode", as_json=True) == 0
    made = json.loads(capsys.readouterr().out)
    assert list(made["cells"]) == ["situ@decode"]
    assert made["cells"]["situ@decode"]["kernels"]["situ_kernel"]["sm_90"]["spill"] == 0


def test_the_committed_table_is_compared_with(capsys):
    assert verb.kernels(target="sm_100", match="situ@decode", check=True) == 0
    assert "situ_kernel" in capsys.readouterr().out


def test_calls_that_match_are_written_and_the_others_stay(monkeypatch, tmp_path, capsys):
    kept = {"triton": "x", "cells": {"mine@once": {"bytes": 1}, "l2_norm@decode": {"bytes": 2}}}
    path = tmp_path / f"{importlib.metadata.version('triton')}.json"
    path.write_text(json.dumps(kept))
    monkeypatch.setattr(table, "TABLES", tmp_path)
    assert verb.kernels(match="l2_norm@decode", write=True, as_json=True) == 0
    written = json.loads(path.read_text())["cells"]
    assert written["mine@once"] == {"bytes": 1}
    assert written["l2_norm@decode"]["kernels"]["l2_norm_kernel"]["sm_90"]["spill"] == 0


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"target": "sm_7"}, "not for 'sm_7'"),
        ({"match": "nobody"}, "no call has 'nobody'"),
        ({"write": True, "target": "sm_90"}, "leave out --target"),
    ],
)
def test_misuse_is_told(asked, said):
    with pytest.raises(ValueError, match=said):
        verb.kernels(**asked)


def test_without_triton_the_remedy_is_told(monkeypatch):
    monkeypatch.setattr(jit_triton, "installed", lambda: False)
    with pytest.raises(ValueError, match="pip install triton"):
        verb.kernels()


def test_the_committed_spaces_say_what_ships_and_why_the_rest_does_not(capsys):
    assert verb.kernels(space=True, match="gate_up_mxfp8/many", target="sm_100") == 0
    wide, ships = capsys.readouterr().out.strip().splitlines()
    assert "spills" in wide
    assert ships.split()[-1] == "ships"
    with pytest.raises(ValueError, match="no space has 'nobody'"):
        verb.kernels(space=True, match="nobody")
