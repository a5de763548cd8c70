"""Kernels compile for GPUs that are not here, and the figures are the compiler's own."""

import pytest
import torch
from k3compile.kernels.jit_triton import Launch

from k3compile.aot.cells import every_cell
from k3compile.aot.compile_triton import compiled, figures, of_amdgcn, signature
from k3compile.aot.parts import PARTS

pytest.importorskip("triton")
CELLS = {cell.name: cell for cell in every_cell()}


def launch_of(name, target):
    return CELLS[name].launches(target)[0]


def test_a_call_is_specialised_as_triton_would():
    x = torch.empty(3, dtype=torch.bfloat16, device="meta")
    made = Launch(None, (1,), (x, None, 1, 24, 32, 1 << 40, 0.5), {"BLOCK": 8}, 4, 1)
    types, constants, attributes = signature(made, list("abcdefg"), hip=False)
    assert list(types.values()) == [
        "*bf16",
        "constexpr",
        "constexpr",
        "i32",
        "i32",
        "i64",
        "fp32",
        "constexpr",
    ]
    assert constants == {"b": None, "c": 1, "BLOCK": 8}
    assert sorted(attributes) == [(0,), (4,), (5,)]
    assert ["tt.pointer_range", 32] in signature(made, list("abcdefg"), hip=True)[2][0,]


def test_a_hopper_kernel_is_a_hopper_kernel():
    made = compiled(launch_of("situ@decode", "sm_90"), PARTS["sm_90"])
    assert ".target sm_90" in made.asm["ptx"]
    assert ".target sm_103" in compiled(launch_of("situ@decode", "sm_103"), PARTS["sm_103"]).asm["ptx"]


@pytest.mark.slow
def test_what_spills_is_seen():
    """The widest row in the registers of one warp cannot be held."""
    wide = launch_of("add_mix_rms_norm@decode", "sm_90")
    narrow = Launch(wide.kernel, wide.grid, wide.args, wide.constants, 1, 1)
    found = figures(narrow, PARTS["sm_90"])
    assert found.spill > 0
    assert found.warps == 1


def test_figures_of_amd_come_from_its_text():
    text = "  .vgpr_count:     64\n  .vgpr_spill_count: 3\n"
    assert of_amdgcn(text) == (64, 12)
