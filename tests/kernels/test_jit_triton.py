"""Kernels sleep until one runs, and what a call would launch can be asked for without a GPU."""

import subprocess
import sys

import pytest
import torch
from k3compile.kernels import jit_triton
from k3compile.kernels.jit_triton import (
    Kernel,
    blocks,
    first_objection,
    interpreting,
    jit,
    launch,
    no_gpu,
    not_rows,
    on_amd,
    power_of_two,
    recording,
    wrong_dtype,
)


@jit
def nothing(x):
    pass


@pytest.mark.slow
def test_the_ops_are_there_without_triton():
    """A machine without it: importing it fails, ours does not, and the refusal says so."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, k3compile.kernels\n"
        "from k3compile.kernels import jit_triton, OPS\n"
        "jit_triton.installed = lambda: False\n"
        "class There: device = torch.device('cuda')\n"
        "print(len(OPS), jit_triton.no_gpu(There()))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split(maxsplit=1)[1].strip() == "triton is not installed"


def test_a_recorded_launch_is_noted_and_not_made():
    x = torch.empty(3, device="meta")
    with recording("sm_90") as made:
        launch(nothing, (2, 3), x, num_warps=8, SIZE=4)
        launch(nothing, (0, 3), x)
    (noted,) = made.launches
    assert (made.target, noted.grid, noted.num_warps, noted.constants) == ("sm_90", (2, 3), 8, {"SIZE": 4})
    assert isinstance(noted.kernel, Kernel)
    assert noted.kernel.name == "nothing"


def test_a_grid_without_programs_runs_nothing():
    launch(nothing, (0,), torch.zeros(1))


def test_refusals_are_in_order_and_name_what_they_found():
    assert first_objection(None, "one", "two") == "one"
    assert first_objection(None) is None
    assert no_gpu(torch.zeros(1)) == "cpu tensors"
    assert (
        wrong_dtype(torch.zeros(1), torch.zeros(1).half()) == "float16 where kernels take bfloat16 or float32"
    )
    assert wrong_dtype(torch.zeros(1)) is None


def test_where_kernels_are_interpreted_tensors_on_a_cpu_are_welcome_and_no_others(monkeypatch):
    monkeypatch.setattr(jit_triton, "installed", lambda: True)
    with interpreting():
        assert no_gpu(torch.zeros(1)) is None
        assert no_gpu(torch.zeros(1, device="meta")) == "meta tensors"
    assert no_gpu(torch.zeros(1)) == "cpu tensors"


@pytest.mark.parametrize(
    ("x", "why"),
    [
        (torch.zeros(2, 8), None),
        (torch.zeros(2, 12)[:, 4:8], None),
        (torch.zeros(2, 12)[:, 3:7], "x has rows that do not start at a multiple of 16 bytes"),
        (torch.zeros(2, 6), "x has rows that do not start at a multiple of 16 bytes"),
        (torch.zeros(8, 2).t(), "x has elements 2 apart along its last dimension, not side by side"),
    ],
)
def test_rows_have_to_be_dense_and_aligned(x, why):
    assert not_rows(x=x) == why


def test_what_is_launched_for_amd_is_known_where_there_is_none():
    assert not on_amd()
    with recording("gfx950"):
        assert on_amd()
    with recording("sm_90"):
        assert not on_amd()


def test_sizes():
    assert [power_of_two(n) for n in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
    assert [blocks(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_triton_is_imported_when_a_kernel_wakes_and_not_before():
    pytest.importorskip("triton")
    code = (
        "import sys; from k3compile.kernels import norm_triton as n, jit_triton as j\n"
        "print('triton' in sys.modules, n.tl is j.tl, isinstance(n.unit_of, j.Kernel))\n"
        "n.l2_norm_kernel.awake()\n"
        "import triton; print(n.tl is triton.language, type(n.unit_of).__name__)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split("\n")[:2] == ["False True True", "True JITFunction"]


def test_installed_is_told_from_where_the_module_would_be(monkeypatch):
    jit_triton.installed.cache_clear()
    monkeypatch.setattr(jit_triton, "find_spec", lambda name: None)
    assert not jit_triton.installed()
    jit_triton.installed.cache_clear()
