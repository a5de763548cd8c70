"""Calls without data are filled with what they may hold."""

from dataclasses import replace

import pytest
import torch
from k3compile.kernels import OPS

from k3compile.aot.cells import Cell, bare, every_cell
from k3compile.gpu_check.exactness import names_of
from k3compile.gpu_check.values import RULES, filled


def small_call():
    """One of decode attention with the argument names of the real ones, small enough to be run."""
    args = lambda: (  # noqa: E731
        bare(4, 2, 12), bare(2 * 14, 16), bare(30, 4, 20), bare(2, 5, dtype=torch.int64),
        bare(2, dtype=torch.int64), bare(3, dtype=torch.int64), 0.3,
    )  # fmt: skip
    return Cell("mla_attend", "small", args, 1, 1)


def test_every_integer_of_every_call_has_a_rule():
    missing = {
        f"{cell.name} {name}"
        for cell in every_cell()
        for name, arg in zip(names_of(OPS[cell.op]), cell.args())
        if isinstance(arg, torch.Tensor) and not arg.is_floating_point() and arg.dtype != torch.uint8
        if name not in RULES
    }
    assert not missing


def test_a_filled_call_is_one_that_the_meaning_takes():
    q, kv_b, pages, table, seen, cu, scale = filled(small_call(), "cpu")
    assert cu.tolist() == [0, 2, 4]
    assert seen.tolist() == [16, 16]
    assert sorted(table.flatten().tolist()) == list(range(1, 11)), "each page once, never the null one"
    got = OPS["mla_attend"].meaning(q, kv_b, pages, table, seen, cu, scale)
    assert torch.isfinite(got).all()
    assert got.float().square().mean() < 10.0


def test_columns_of_a_wider_row_stay_columns_and_share_their_memory():
    def args():
        both = bare(6, 64)
        return both[:, :32], both[:, 32:], 4.0, 25.0

    gate, up, *_ = filled(Cell("situ", "small", args, 1, 1), "cpu")
    assert gate.stride() == (64, 1)
    assert gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
    assert torch.isfinite(gate).all()
    assert not torch.equal(gate, up)


def test_an_unknown_integer_is_refused(monkeypatch):
    monkeypatch.delitem(RULES, "seen")
    with pytest.raises(ValueError, match=r"mla_attend@small: nothing is known about the integers of 'seen'"):
        filled(replace(small_call()), "cpu")
