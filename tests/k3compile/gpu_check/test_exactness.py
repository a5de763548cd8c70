"""The error rule: what it measures, what it refuses to pass, and that other draws are looked at."""

from dataclasses import replace

import pytest
import torch
from k3compile.kernels import OPS

from k3compile.gpu_check.exactness import Distance, check, result_names, samples_of

NORM, CONV, ROUTE = OPS["rms_norm"], OPS["short_conv"], OPS["route"]


@pytest.fixture
def by(monkeypatch):
    """Let an op have an implementation ``test``, and check it."""

    def use(op, fn, objection=lambda *args: None, dtype=torch.float32, draws=3):
        made = replace(next(iter(op.implementations.values())), fn=fn, objection=objection)
        monkeypatch.setitem(op.implementations, "test", made)
        return check(op, "test", dtype, range(draws))

    return use


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", [NORM, CONV, ROUTE], ids=lambda op: op.name)
def test_the_meaning_is_exactly_as_exact_as_itself(by, op, dtype):
    found = by(op, op.meaning, dtype=dtype)
    assert found.complaints == []
    assert found.ratio == 1.0
    assert 0 < found.worst < 1
    assert found.calls == 3 * len(list(op.each_sample()))


def test_an_error_below_the_tolerance_and_above_the_meanings_own_is_told(by):
    found = by(NORM, lambda x, w, eps: NORM.meaning(x, w, eps) * (1 + 3e-7))
    (said,) = found.complaints
    assert found.worst < 1
    assert said.startswith("result: error ")
    assert said.endswith("times that of the meaning, at most 1.1 is allowed")


def test_an_error_above_the_tolerance_is_told_with_its_place(by):
    found = by(NORM, lambda x, w, eps: NORM.meaning(x, w, eps) * (1 + 1e-4), draws=1)
    assert found.worst > 1
    assert "result (1, 24): off by" in found.complaints[0]


def test_a_written_argument_counts_as_a_result(by):
    def forgetful(x, weight, window, slots, cu):
        return CONV.meaning(x, weight, window.clone(), slots, cu)

    assert any(said.startswith("window") for said in by(CONV, forgetful).complaints)


def test_integers_must_be_equal(by):
    def other(*args):
        weights, ids = ROUTE.meaning(*args)
        return weights, ids.flip(1)

    assert any("integers differ" in said for said in by(ROUTE, other).complaints)


def test_what_is_not_finite_or_has_another_shape_is_told(by):
    assert any("not finite" in c for c in by(NORM, lambda x, w, eps: x * torch.nan).complaints)
    assert any("has the shape" in c for c in by(NORM, lambda x, w, eps: x[:0]).complaints)


def test_a_write_beside_the_arguments_is_told(by):
    def careless(x, w, eps):
        w.as_strided((1,), (1,), w.storage_offset() + w.numel()).fill_(0.0)
        return NORM.meaning(x, w, eps)

    assert "1 elements beside the arguments were written" in by(NORM, careless).complaints


def test_refused_calls_are_counted_and_aligned_ones_tried_first(by):
    def at_sixteen_bytes(x, *rest):
        return "not aligned" if x.stride(0) * x.element_size() % 16 else None

    found = by(CONV, CONV.meaning, at_sixteen_bytes, dtype=torch.bfloat16, draws=1)
    assert (dict(found.refused), found.complaints) == ({}, [])
    found = by(CONV, CONV.meaning, lambda *args: "never", draws=1)
    assert (found.calls, found.refused["never"]) == (0, len(list(CONV.each_sample())))


def test_draws_go_on_until_there_are_numbers_enough(by, monkeypatch):
    monkeypatch.setattr("k3compile.gpu_check.exactness.ENOUGH", 400)
    numbers = sum(args[0].numel() for args in samples_of(NORM, torch.float32, 0))
    found = by(NORM, NORM.meaning, draws=20)
    assert found.distances["result"].numbers == -(-400 // numbers) * numbers


def test_ratios():
    assert Distance().ratio == 1.0
    assert Distance(4.0, 1.0).ratio == 2.0
    assert Distance(1e-30, 0.0).ratio == float("inf")
    assert result_names(CONV, 2) == ["result", "window"]
    assert result_names(ROUTE, 2) == ["result 0", "result 1"]
