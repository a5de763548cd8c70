"""What the meaning leaves alone is found, and an implementation that does not is told."""

from dataclasses import replace

import pytest
import torch
from k3compile.kernels import OPS
from k3compile.kernels.kda_verify import kda_commit
from k3compile.kernels.samples import Draw, row_bounds

from k3compile.gpu_check.exactness import names_of
from k3compile.gpu_check.poison import calls, check, spared

CONV = OPS["short_conv"]


def call():
    """Two rows of three and of two tokens; a sixth token is nobody's."""
    draw = Draw(torch.float32)
    window, slots = draw.normal(5, 3, 8), torch.tensor([2, 4])
    return draw.normal(6, 8), draw.normal_acc(8, 4), window, slots, row_bounds([3, 2])


def test_rows_that_nobody_has_are_found():
    found = {names_of(CONV)[i]: rows.tolist() for i, rows in spared(CONV, call())}
    others = [3 * slot + row for slot in (0, 1, 3) for row in range(3)]
    assert found == {"x": [5], "window": others}


@pytest.fixture
def conv_by(monkeypatch):
    """Let short_conv have an implementation ``test``."""

    def use(fn):
        made = replace(next(iter(CONV.implementations.values())), fn=fn, objection=lambda *args: None)
        monkeypatch.setitem(CONV.implementations, "test", made)
        return check(CONV, "test", call(), torch.float32).complaints

    return use


def test_the_meaning_itself_is_no_trouble(conv_by):
    assert conv_by(CONV.meaning) == []


def test_a_slot_of_somebody_else_must_not_be_written(conv_by):
    def careless(x, weight, window, slots, cu):
        y = CONV.meaning(x, weight, window, slots, cu)
        window[3] = 0.0
        return y

    assert conv_by(careless) == ["rows of window that are not the call's were written"]


def test_a_token_of_nobody_must_not_be_read(conv_by):
    def careless(x, weight, window, slots, cu):
        return CONV.meaning(x, weight, window, slots, cu) + 0.0 * x[-1]

    (said,) = conv_by(careless)
    assert said.startswith("result with NaN beside it: 48 values are not finite")


def test_memory_beside_an_argument_must_not_be_written(conv_by):
    def careless(x, weight, window, slots, cu):
        y = CONV.meaning(x, weight, window, slots, cu)
        x.as_strided((1,), (1,), x.storage_offset() + x.numel()).fill_(0.0)
        return y

    assert conv_by(careless) == ["1 elements beside the arguments were written"]


def test_calls_are_small_and_have_something_in_them():
    made = calls(CONV, torch.float32)
    assert all(a.numel() for args in made for a in args)
    assert any(args[4][-1] < len(args[0]) for args in made), "one has a token row of nobody"
    assert calls(kda_commit, torch.float32, most=10) == []
