"""The check as a whole: what it says of a kernel that is right, wrong, or breaks, and of too little time."""

import json
import time

import pytest
import torch
from k3compile.kernels import OPS
from k3compile.kernels.jit_triton import recording

from k3compile.gpu_check import cells_triton, model, run
from k3compile.gpu_check.exactness import Verdict
from k3compile.gpu_check.run import Run, complaints, driver, guarded, with_triton

pytest.importorskip("triton")


@pytest.mark.slow
def test_interpreted_in_a_process_of_its_own_norms_are_right():
    made = run.interpreted("rms_norm", 300, with_model=False)
    assert made["passed"], complaints(made)
    assert made["mode"] == "interpreted"
    assert made["card"] is None
    assert {o["op"] for o in made["ops"]} == {op.name for op, _ in with_triton("rms_norm")}
    assert all(o["calls"] for o in made["ops"])


def test_a_process_that_breaks_is_told(monkeypatch):
    monkeypatch.setattr(run.sys, "executable", "false")
    with pytest.raises(RuntimeError, match="ended with code 1"):
        run.interpreted("", 1, with_model=False)


@pytest.fixture
def meaning_for_triton(monkeypatch):
    """As if Triton were here: the ops' meanings stand for its kernels, and they take what is on a CPU."""
    from dataclasses import replace

    for op, provider in with_triton(""):
        made = replace(op.implementations[provider], fn=op.meaning, objection=lambda *args: None)
        monkeypatch.setitem(op.implementations, provider, made)


def test_without_an_end_of_time_all_is_done(meaning_for_triton):
    made = run.run("cpu", "situ", with_model=False, say=lambda line: None)
    assert made["passed"]
    assert made["not_reached"] == []
    assert json.loads(json.dumps(made))["ops"][0]["ratio"] == 1.0
    assert "cells" not in made, "nothing is timed without a GPU"


def test_what_time_was_too_short_for_is_no_pass(meaning_for_triton):
    made = run.run("cpu", "rms_norm", seconds=-1, with_model=True, say=lambda line: None)
    assert made["ops"] == []
    assert not made["passed"]
    assert "no time was left for the trained tiny model, compiled" in complaints(made)


def test_a_kernel_that_breaks_ends_no_run(meaning_for_triton, monkeypatch):
    def broken(*args):
        raise RuntimeError("first line\nout of registers")

    from dataclasses import replace

    op = OPS["rms_norm"]
    monkeypatch.setitem(op.implementations, "triton", replace(op.implementations["triton"], fn=broken))
    monkeypatch.setattr(run.exactness.check, "__defaults__", (range(1), "cpu"))
    made = run.run("cpu", "rms_norm", with_model=False, say=lambda line: None)
    assert complaints(made) == ["rms_norm torch.float32: RuntimeError: out of registers"]
    assert len(made["ops"]) == len(with_triton("rms_norm"))


def test_an_op_that_takes_no_sample_is_no_pass(meaning_for_triton, monkeypatch):
    from dataclasses import replace

    op = OPS["situ"]
    refuses = replace(op.implementations["triton"], objection=lambda *args: "no")
    monkeypatch.setitem(op.implementations, "triton", refuses)
    said = run.check_op(op, "triton", torch.float32, "cpu")["complaints"]
    assert said == ["no sample of the op is one that it takes"]


def test_the_models_answers_and_the_calls_count(monkeypatch, meaning_for_triton):
    monkeypatch.setattr(model, "check", lambda *a, **k: {"wrong": ["prompt 3: token 0 is 5 and not 6"]})
    made = run.run("cpu", "situ", say=lambda line: None)
    assert complaints(made) == ["model: prompt 3: token 0 is 5 and not 6"]
    made["cells"] = [{"cell": "situ@decode", "complaints": ["refused: why"]}]
    assert "situ@decode: refused: why" in complaints(made)


def test_on_a_gpu_both_dtypes_and_all_calls_are_gone_through(monkeypatch):
    monkeypatch.setattr(run, "machine", lambda device: {"card": "a card", "part": None})
    monkeypatch.setattr(cells_triton, "part_here", lambda: None)
    monkeypatch.setattr(cells_triton, "measure", lambda cell, part: {"cell": cell.name, "complaints": []})
    monkeypatch.setattr(
        run, "check_op", lambda op, provider, dtype, device: {"dtype": str(dtype), "complaints": []}
    )
    monkeypatch.setattr(model, "check", lambda device, inner, say: {"device": device, "inner": inner})
    said = []
    made = run.run("cuda", "situ", say=said.append)
    assert [o["dtype"] for o in made["ops"]] == ["torch.float32", "torch.bfloat16"]
    assert [c["cell"] for c in made["cells"]] == ["situ@decode", "situ@prefill"]
    assert made["model"] == {"device": "cuda", "inner": "inductor"}
    assert made["passed"]
    assert [line.partition(", ")[2] for line in said] == [
        "1 of 5: situ triton torch.float32", "2 of 5: situ triton torch.bfloat16",
        "3 of 5: the trained tiny model, compiled", "4 of 5: situ@decode", "5 of 5: situ@prefill",
    ]  # fmt: skip


def test_what_is_not_for_this_gpu_is_left_out_and_said_and_no_complaint(monkeypatch):
    monkeypatch.setattr(run, "machine", lambda device: {"card": "a card", "part": None})
    monkeypatch.setattr(
        run.exactness, "check", lambda op, provider, dtype, device: Verdict(op.name, provider, "", 1)
    )
    monkeypatch.setattr(run.poison, "calls", lambda op, dtype: [])
    monkeypatch.setattr(cells_triton, "filled", broken)
    with recording("sm_90"):
        made = run.run("cuda", "experts_unfinalized", with_model=False, say=lambda line: None)
    why = "it is for sm_100, sm_103, gfx950, and this is sm_90"
    assert [(o["provider"], o.get("skipped")) for o in made["ops"]] == [
        ("triton", None), ("triton", None), ("triton_mxfp8", why), ("triton_mxfp8", why)
    ]  # fmt: skip
    assert {c["cell"]: c.get("skipped") for c in made["cells"]} == {
        f"experts_unfinalized{kind}@{case}": why if kind else None
        for kind in ("", "_mxfp8") for case in ("decode", "chunk", "prefill")
    }  # fmt: skip
    assert complaints(made) == [
        f"experts_unfinalized@{case}: KeyError: 'seen'" for case in ("decode", "chunk", "prefill")
    ]


def broken(cell, device):
    raise KeyError("seen")


def test_time_and_failures():
    todo = Run(2, 60.0, lambda line: None, started=time.perf_counter() - 61)
    assert not todo.reached("it")
    assert todo.not_reached == ["it"]
    assert guarded(lambda: {"a": 1}, op="x") == {"a": 1}
    assert guarded(lambda: {}["b"], op="x") == {"op": "x", "complaints": ["KeyError: 'b'"]}


def test_the_driver_is_asked_of_its_makers_tool(monkeypatch, tmp_path):
    monkeypatch.setattr(run.shutil, "which", lambda name: None)
    assert driver() is None
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 580.65\necho 580.65\n")
    tool.chmod(0o755)
    monkeypatch.setattr(run.shutil, "which", lambda name: str(tool))
    assert driver() == "580.65"
