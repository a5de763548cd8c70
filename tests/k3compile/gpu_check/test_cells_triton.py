"""A call is judged at its own size and timed beside the roofline; the clock alone needs a GPU."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from k3compile.kernels import OPS, jit_triton
from k3compile.kernels.jit_triton import recording

from k3compile.aot.cells import Cell, bare
from k3compile.aot.parts import PARTS
from k3compile.gpu_check.cells_triton import measure, not_for_here, part_here, targets_of

SITU = OPS["situ"]
CELL = Cell("situ", "small", lambda: (bare(6, 32), bare(6, 32), 4.0, 25.0), 4_800_000, 2_000_000_000)


@pytest.fixture
def by(monkeypatch):
    def use(fn, objection=lambda *args: None):
        made = replace(SITU.implementations["triton"], fn=fn, objection=objection)
        monkeypatch.setitem(SITU.implementations, "triton", made)

    return use


def test_a_call_is_run_judged_and_timed(by):
    by(SITU.meaning)
    ran = []

    def clock(call):
        ran.append(call())
        return 0.002

    found = measure(CELL, PARTS["sm_90"], "cpu", clock)
    assert ran[0].shape == (6, 32)
    assert found["complaints"] == []
    assert (found["ms"], found["gb_per_s"], found["tflop_per_s"]) == (0.002, 2400.0, 1000.0)
    assert found["roofline_us"] == pytest.approx(2.02, abs=0.01), "of the flops: 2e9 at 0.99e15 a second"
    assert found["of_roofline"] == pytest.approx(1.01, abs=0.01)


def test_wrong_results_are_told_and_timed_all_the_same(by):
    by(lambda gate, up, *betas: SITU.meaning(gate, up, *betas) * 1.5)
    found = measure(CELL, None, "cpu", lambda call: 1.0)
    assert "off by" in found["complaints"][0]
    assert (found["roofline_us"], found["of_roofline"]) == (None, None)


def test_a_refused_call_is_told(by):
    by(SITU.meaning, lambda *args: "rows too long")
    assert measure(CELL, None, "cpu", lambda call: 1.0) == {
        "cell": "situ@small", "complaints": ["refused: rows too long"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("hip", "properties", "target"),
    [
        (None, (10, 0), "sm_100"),
        (None, (8, 0), None),
        ("7.0", {"gcnArchName": "gfx950:sramecc+:xnack-"}, "gfx950"),
    ],
)
def test_the_part_is_told_from_the_card(monkeypatch, hip, properties, target):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: properties)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
    monkeypatch.setattr(torch.version, "hip", hip)
    jit_triton.present.cache_clear()
    try:
        found = part_here()
    finally:
        jit_triton.present.cache_clear()
    assert (found and found.target) == target


@pytest.mark.parametrize(
    ("here", "of_some", "of_all"),
    [
        ("sm_100", None, None),
        ("sm_90", "it is for sm_100, gfx950, and this is sm_90", None),
        ("sm_80", "it is for sm_100, gfx950, and this is sm_80", None),
        ("", "it is for sm_100, gfx950, and this is no GPU", None),
    ],
)
def test_kernels_for_some_parts_are_left_out_on_all_others(here, of_some, of_all):
    with recording(here):
        assert not_for_here(("sm_100", "gfx950")) == of_some
        assert not_for_here(tuple(PARTS)) == of_all


def test_a_call_that_is_not_for_this_gpu_is_not_made():
    never = replace(CELL, args=lambda: 1 / 0, targets=("sm_100",))
    with recording("sm_90"):
        assert measure(never, None, "cpu", lambda call: 1.0) == {
            "cell": "situ@small", "skipped": "it is for sm_100, and this is sm_90", "complaints": [],
        }  # fmt: skip


def test_an_implementation_is_for_the_parts_that_its_calls_are_compiled_for():
    assert targets_of("experts_unfinalized", "triton_mxfp8") == ["sm_100", "sm_103", "gfx950"]
    assert targets_of("experts_unfinalized", "triton") == list(PARTS)
    assert targets_of("situ", "an implementation without a call") == list(PARTS)
