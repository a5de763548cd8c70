"""The committed table holds for what is shipped, and today's compiler makes it again."""

import copy
import importlib.metadata
import io

import pytest
from rich.console import Console

from k3compile.aot.cells import every_cell
from k3compile.aot.parts import PARTS
from k3compile.aot.table import TABLES, committed, complaints, differences, measure, shown

CELLS = {cell.name: cell for cell in every_cell()}
VERSIONS = sorted(path.stem for path in TABLES.glob("*.json"))
FAST = [
    ("add_mix_rms_norm@decode", "gfx950"),
    ("situ@prefill", "sm_100"),
    ("kda_decode@decode", "sm_90"),
]
SLOWER = [
    ("add_rms_norm@decode", "sm_103"),
    ("add_mix_rms_norm@decode", "sm_90"),
    ("short_conv_export@prefill", "sm_103"),
    ("kda_decode@decode", "sm_103"),
    ("kda_decode@decode", "gfx950"),
    ("route@decode", "sm_103"),
    ("mla_attend@decode", "sm_90"),
]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_committed_table_has_every_call_on_every_part(version):
    table = committed(version)
    assert set(table["cells"]) == set(CELLS)
    for name, cell in table["cells"].items():
        assert cell["bytes"] == CELLS[name].num_bytes
        for by_target in cell["kernels"].values():
            assert set(by_target) == set(CELLS[name].targets)


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_shipped_does_not_spill_and_fits(version):
    assert complaints(CELLS.values(), committed(version)) == []


def installed():
    pytest.importorskip("triton")
    return committed(importlib.metadata.version("triton"))


@pytest.mark.parametrize(
    ("name", "target"), [*FAST, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOWER)]
)
def test_the_table_is_made_again(name, target):
    kept = installed()
    made = {"cells": {name: measure(CELLS[name], [PARTS[target]])}}
    assert differences(made, kept) == []


@pytest.mark.slow
def test_all_of_the_table_is_made_again():
    kept = installed()
    made = {"cells": {name: measure(cell, PARTS.values()) for name, cell in CELLS.items()}}
    assert differences(made, kept) == []


def test_complaints_name_call_kernel_and_part():
    table = copy.deepcopy(committed(VERSIONS[-1]))
    found = table["cells"]["situ@decode"]["kernels"]["situ_kernel"]
    found["sm_90"] |= {"spill": 8}
    found["sm_100"] |= {"shared": 300_000}
    found["gfx950"] |= {"resident": 0}
    assert complaints(CELLS.values(), table) == [
        "situ@decode situ_kernel gfx950: not one program fits a core",
        "situ@decode situ_kernel sm_100: 300000 bytes shared of 232448",
        "situ@decode situ_kernel sm_90: spills 8 bytes a thread",
    ]


def test_a_promised_instruction_that_is_missing_is_told():
    from dataclasses import replace

    cell = replace(CELLS["situ@decode"], needs=(("sm_90", "wgmma"),))
    assert complaints([cell], committed(VERSIONS[-1])) == ["situ@decode sm_90: no wgmma"]


def test_differences_are_told_and_a_version_without_a_table_is_refused():
    kept = committed(VERSIONS[-1])
    made = copy.deepcopy({"cells": {"situ@decode": kept["cells"]["situ@decode"]}})
    assert differences(made, kept) == []
    made["cells"]["situ@decode"]["flops"] += 1
    made["cells"]["situ@decode"]["kernels"]["situ_kernel"]["sm_90"]["registers"] = 1
    assert [line.split(":")[0] for line in differences(made, kept)] == [
        "situ@decode",
        "situ@decode situ_kernel sm_90",
    ]
    assert differences({"cells": {"new": {}}}, kept) == ["new: not in the committed table"]
    with pytest.raises(ValueError, match=r"no table was committed for Triton 1\.0"):
        committed("1.0")


def test_the_text_has_a_line_for_each_kernel_and_part():
    said = io.StringIO()
    Console(width=250, file=said).print(shown(committed(VERSIONS[-1])))
    lines = said.getvalue().splitlines()
    assert len([line for line in lines if "kda_decode_kernel" in line]) == len(PARTS)
