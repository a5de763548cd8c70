"""Every Triton implementation is compiled at the released sizes, as it would be launched."""

import sys

import pytest
from k3compile.kernels import OPS
from k3compile.kernels.jit_triton import recording

from k3compile.aot.cells import every_cell
from k3compile.aot.parts import PARTS

CELLS = every_cell()


def test_every_triton_implementation_has_a_cell():
    in_triton = {(name, p) for name, op in OPS.items() for p in op.implementations if p.startswith("triton")}
    without = in_triton - {(cell.op, cell.provider) for cell in CELLS}
    assert without <= {("attn_res_mix", "triton")}, "its kernel is compiled with the norm that follows it"


def test_names_are_unique():
    assert len({cell.name for cell in CELLS}) == len(CELLS)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_arguments_without_data_launch_and_nothing_is_objected_to(cell, monkeypatch):
    """Only that the tensors are on no GPU may be said against them."""
    implementation = OPS[cell.op].implementations[cell.provider]
    for module in list(sys.modules.values()):
        if module.__name__.startswith("k3compile.kernels.") and hasattr(module, "no_gpu"):
            monkeypatch.setattr(module, "no_gpu", lambda *tensors: None)
    for target in cell.targets:
        assert cell.launches(target)
        with recording(target):
            assert implementation.objection(*cell.args()) is None


def test_the_released_sizes_are_the_models():
    from k3compile.aot import cells

    assert (cells.WIDTH, cells.LATENT, cells.HEADS, cells.HEAD) == (7168, 3584, 12, 128)
    state = cells.REQUESTS * 12 * 128 * 128 * 4
    (decode,) = [cell for cell in CELLS if cell.op == "kda_decode"]
    assert 2 * state < decode.num_bytes < 2.1 * state, "a step is the state in and out, and little else"


def test_all_parts_are_launched_for():
    for target in PARTS:
        assert CELLS[0].launches(target)[0].num_warps == 8
