"""The result as text: every op, every call, and all that is wrong."""

import io

from rich.console import Console

from k3compile.gpu_check.render import heading, text

OP = {"op": "situ", "dtype": "float32", "calls": 9, "refused": {"why": 2}, "ratio": 1.02, "worst": 0.25}
CELL = {"cell": "situ@decode", "ms": 0.5, "gb_per_s": 3000.0, "tflop_per_s": 1.5, "of_roofline": 0.625,
        "worst": 0.1, "complaints": []}  # fmt: skip
MADE = {
    "card": "NVIDIA H200", "part": "H200", "driver": "580.65", "torch": "2.13.0", "triton": "3.8.0",
    "seconds": 61.0, "passed": False, "not_reached": ["situ@prefill"],
    "ops": [OP | {"complaints": []}, {"op": "route", "dtype": "float32", "complaints": ["Broken: it"]}],
    "cells": [CELL, {"cell": "route@decode", "complaints": ["refused: why"]}],
    "model": {"prompts": 12, "same": 11, "tie": 0, "wrong": ["prompt 3: token 0 is 5 and not 6"],
              "graphs": 4, "compile_seconds": 30.0},
}  # fmt: skip


def shown(made):
    said = io.StringIO()
    Console(width=140, file=said).print(text(made))
    return said.getvalue()


def test_all_of_it_is_there():
    said = shown(MADE)
    for part in ("1.020", "25.0%", "3000", "62%", "11 answered alike", "4 graphs"):
        assert part in said, part
    for line in (
        "route float32: Broken: it",
        "route@decode: refused: why",
        "no time was left for situ@prefill",
    ):
        assert line in said
    assert "model: prompt 3: token 0 is 5 and not 6" in said


def test_the_heading_says_where_and_how_it_ended():
    assert heading(MADE) == (
        "NVIDIA H200, held against H200, driver 580.65; torch 2.13.0, triton 3.8.0; 61 s: 4 complaints"
    )
    alone = MADE | {"card": None, "part": None, "driver": None, "passed": True}
    assert heading(alone).startswith("interpreted on a CPU: no GPU was used, nothing was timed")
    assert heading(alone).endswith("passed")


def test_what_was_left_out_has_its_reason():
    made = MADE | {
        "ops": [{"op": "route", "dtype": "float32", "skipped": "it is for sm_100", "complaints": []}],
        "cells": [{"cell": "route@decode", "skipped": "it is for gfx950", "complaints": []}],
    }
    said = shown(made)
    assert "it is for sm_100" in said
    assert "it is for gfx950" in said
    assert "failed" not in said


def test_without_a_part_or_calls_nothing_is_made_up():
    made = MADE | {"cells": [CELL | {"of_roofline": None}], "model": {}}
    assert "%" not in shown(made).split("situ@decode")[1].split("\n")[0].replace("10.0%", "")
    assert "roofline" not in shown({k: v for k, v in MADE.items() if k != "cells"})
