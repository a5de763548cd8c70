"""The short convolutions in Triton, interpreted, against the float64 meaning and around their own memory."""

import pytest
import torch
from interpreted import check_op, check_samples, interpreted, meaning_of, outcome_of
from k3compile.kernels import OPS
from k3compile.kernels.conv_triton import objection
from k3compile.kernels.samples import row_bounds

CONVS = ("short_conv", "short_conv_export", "short_conv_verify")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONVS)
def test_samples_come_out_as_the_meaning_says(name, dtype):
    check_samples(name, dtype)


def poisoned(lengths, past=3, channels=20, slots=7):
    """Arguments of short_conv among NaN: past the last row, between rows, and in every other slot's gap."""
    total = sum(lengths)
    x = torch.full((total + past, 3 * channels), torch.nan)
    x[:total, channels : 2 * channels] = torch.randn(total, channels)
    window = torch.full((slots, 5, channels), torch.nan)
    places = torch.randperm(slots)[: len(lengths)]
    window[places, 1:4] = torch.randn(len(lengths), 3, channels)
    taps = torch.randn(channels, 4)
    return x[:, channels : 2 * channels], taps, window[:, 1:4], places, row_bounds(lengths)


@pytest.mark.parametrize("lengths", [[1], [2, 0, 1], [3, 4], [17, 1, 5], [0, 0, 33]], ids=str)
def test_only_its_own_rows_are_read_and_written(lengths):
    x, taps, window, slots, cu = poisoned(lengths)
    fn = OPS["short_conv"].implementations["triton"].fn
    y, after = interpreted(fn.__module__, fn.__name__, x, taps, window, slots, cu)
    (want,), (moved,) = meaning_of("short_conv", (x, taps, window, slots, cu))
    torch.testing.assert_close(y.double(), want, atol=1e-5, rtol=0)
    left = after[2]
    torch.testing.assert_close(left[slots].double(), moved[slots], atol=0, rtol=0)
    gaps = left.as_strided((7, 5, 20), (100, 20, 1), 0)[:, ::4]
    assert gaps.isnan().all(), "the memory between windows was written"
    others = [s for s in range(7) if s not in slots.tolist()]
    assert left[others].isnan().all()


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 20])
def test_a_window_is_exported_as_a_run_that_stops_there_leaves_it(offset):
    x, taps, window, slots, cu = poisoned([20, 6])
    others = [s for s in range(7) if s not in slots.tolist()]
    columns = torch.tensor([offset, 0], dtype=torch.int32), torch.tensor([others[0], 0], dtype=torch.int32)
    _, (left,) = outcome_of("short_conv_export", (x, taps, window, slots, cu, *columns))
    _, (stopped,) = outcome_of("short_conv", (x[:offset], taps, window, slots[:1], row_bounds([offset])))
    assert torch.equal(left[others[0]], stopped[slots[0]])


@pytest.mark.parametrize(("offset", "slot"), [(7, 5), (-1, 5), (3, 70), (3, -1)])
def test_a_wrong_export_writes_nothing(offset, slot):
    x, taps, window, slots, cu = poisoned([6])
    columns = torch.tensor([offset], dtype=torch.int32), torch.tensor([slot], dtype=torch.int32)
    _, (left,) = outcome_of("short_conv_export", (x, taps, window, slots, cu, *columns))
    _, (plain,) = outcome_of("short_conv", (x, taps, window, slots, cu))
    torch.testing.assert_close(left, plain, equal_nan=True, rtol=0, atol=0)


def test_more_tokens_than_records_are_computed_and_not_recorded():
    x, taps, window, slots, cu = poisoned([6])
    rec = torch.full((7, 4, 20), 7.0)
    (y,), (left,) = outcome_of("short_conv_verify", (x, taps, window, slots, cu, rec))
    assert torch.equal(left[slots[0]], x[:4])
    assert (left[[s for s in range(7) if s != slots[0]]] == 7.0).all()
    (want,), _ = meaning_of("short_conv", (x, taps, window, slots, cu))
    torch.testing.assert_close(y.double(), want, atol=1e-5, rtol=0)


def test_bfloat16_windows_hold_the_raw_rows():
    x, window = torch.randn(9, 16).bfloat16(), torch.randn(3, 3, 16).bfloat16()
    args = (x, torch.randn(16, 4), window, torch.tensor([1]), row_bounds([9]))
    _, (left,) = check_op("short_conv", torch.bfloat16, args)
    assert torch.equal(left[1], x[6:])


def test_what_does_not_fit_is_refused(monkeypatch):
    from k3compile.kernels import conv_triton

    args = list(OPS["short_conv"].each_sample())[2]
    assert objection(*args) == "cpu tensors"
    monkeypatch.setattr(conv_triton, "no_gpu", lambda *tensors: None)
    assert objection(*args) is None
    assert "float64" in objection(args[0].double(), *args[1:])
    column = torch.zeros(8, dtype=torch.int32)[::2]
    assert "export_slot has elements 2 apart" in objection(*args, column.contiguous(), column)
    assert "rec_x has elements 2 apart" in objection(*args, torch.zeros(8, 3, 24)[..., ::2])
    assert "cu has elements 2 apart" in objection(*args[:4], torch.arange(4)[::2])
    assert "weight has elements 12 apart" in objection(args[0], torch.randn(4, 12).t(), *args[2:])
