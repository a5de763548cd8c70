"""The yardstick itself: medians, intervals, and rounds that take turns."""

import pytest
import torch

from k3compile.bench.limits import LARGE, MachineLimits, SameMemory, Sample, flat_of, interleaved, measure


def test_limits_are_counted_in_bytes_and_flops_of_the_products_that_were_timed():
    limits = measure(side=512, rounds=2)
    assert 1e8 < limits.bytes_per_second < 1e13
    assert 1e8 < limits.flops_per_second < 1e14
    assert 1e8 < limits.copy_bytes_per_second < 1e13


def test_of_two_measurements_the_better_of_each_counts():
    one, other = MachineLimits(2, 1.0, 20.0, 5.0), MachineLimits(2, 3.0, 10.0, 6.0)
    assert one.or_better(other) == MachineLimits(2, 3.0, 20.0, 6.0) == other.or_better(one)


def test_the_interval_is_the_middle_half():
    sample = Sample((1.0, 2.0, 3.0, 4.0, 100.0))
    assert sample.median == 3.0
    assert sample.interval == (2.0, 4.0)
    assert Sample((2.0,)).interval == (2.0, 2.0)


def test_rounds_take_turns_and_the_first_call_is_not_counted():
    calls = []
    samples = interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3)
    assert calls == ["a", "b"] * 4
    assert {name: len(s.values) for name, s in samples.items()} == {"a": 3, "b": 3}
    assert samples["a"].median == pytest.approx(0, abs=0.1)


def test_all_memory_of_large_tensors_is_read_once(monkeypatch):
    large, bytes_ = torch.ones(LARGE // 4 + 3), torch.zeros(2 * LARGE + 3, dtype=torch.uint8)
    memory = SameMemory([large, large[5:], bytes_, bytes_.view(-1)[1:], torch.ones(7)])
    assert memory.bytes == 4 * (LARGE // 4 + 3) + 2 * LARGE
    read, total = [], torch.Tensor.sum
    monkeypatch.setattr(torch.Tensor, "sum", lambda t: read.append(t) or total(t))
    memory()
    assert sorted(t.data_ptr() for t in read) == sorted(t.data_ptr() for t in (large, bytes_))
    assert sum(t.numel() * t.element_size() for t in read) == memory.bytes


def test_memory_is_looked_at_as_numbers_whatever_they_mean():
    assert torch.equal(
        flat_of(torch.tensor([1.5, 2.0, 3.0])[1:].untyped_storage()), torch.tensor([1.5, 2.0, 3.0])
    )
    halves = torch.tensor([0, 16256, 0, 16384, 7], dtype=torch.int16)
    assert flat_of(halves.untyped_storage()).tolist() == [1.0, 2.0]
