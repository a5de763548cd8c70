"""The convolution without records in Triton, interpreted: a window after every draft, in its own slot."""

import pytest
import torch
from interpreted import check_op, check_samples, meaning_of, outcome_of
from k3compile.kernels import OPS
from k3compile.kernels.samples import Draw, row_bounds
from kda_rows import error_ratios, near, untouched

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
NAME, J = "short_conv_verify_states", 5


@FLOATS
def test_samples_come_out_as_the_meaning_says(dtype):
    check_samples(NAME, dtype)


def drafts(lengths, own=(), dtype=torch.float32, channels=24, slots=24, past=3, seed=0):
    """Arguments among NaN: beside and past the rows, in every other slot and between slots. own: (request,
    row) pairs whose target is the slot that the request lives in.
    """
    draw, tokens = Draw(dtype, seed), sum(lengths)
    x = torch.full((tokens + past, 3, channels), torch.nan, dtype=dtype)
    x[:tokens, 1] = draw.normal(tokens, channels)
    window = torch.full((slots, 2, 3, channels), torch.nan, dtype=dtype)
    places = draw.choice(len(lengths), slots)
    window[places, 0] = draw.normal(len(lengths), 3, channels)
    free = iter([s for s in range(slots) if s not in places.tolist()])
    lines = [
        [home if (r, i) in own else next(free) for i in range(n)] + [0] * (J - n)
        for r, (home, n) in enumerate(zip(places.tolist(), lengths))
    ]
    scratch = torch.tensor(lines, dtype=torch.int64).view(-1, J)
    return [x[:, 1], draw.normal_acc(channels, 4), window[:, 0], places, row_bounds(lengths), scratch]


def targets(args, lengths):
    return [s for line, n in zip(args[5].tolist(), lengths) for s in line[:n]]


@FLOATS
@pytest.mark.parametrize("own", [(), ((0, 0),), ((0, 1), (3, 4)), ((0, 0), (2, 0), (3, 2))], ids=str)
def test_every_target_holds_the_window_after_its_row_and_nothing_else_is_written(dtype, own):
    lengths = [4, 0, 1, 5]
    args = drafts(lengths, own, dtype)
    (got,), (left,) = outcome_of(NAME, args)
    (want,), (stepped,) = meaning_of(NAME, args)
    assert torch.equal(got[10:], torch.zeros_like(got[10:])), "rows of nobody are zero"
    near(got[:10], want[:10], 1e-6 if dtype == torch.float32 else 5e-3)
    written = targets(args, lengths)
    assert torch.equal(left[written].double(), stepped[written]), "raw rows are copied"
    homes = [s for s in args[3].tolist() if s not in written]
    assert torch.equal(left[homes], args[2][homes]), "a window is only read"
    untouched(left, [*written, *homes])


def test_no_rows_and_only_rows_of_nobody():
    for lengths in ([], [0, 0]):
        args = drafts(lengths, past=4)
        (got,), (left,) = outcome_of(NAME, args)
        assert torch.equal(got, torch.zeros(4, 24))
        untouched(left, args[3].tolist())
        assert torch.equal(left[args[3]], args[2][args[3]])


def test_channels_past_the_last_full_block_are_there_and_no_more():
    args = drafts([3, 2], channels=300)
    (got,), (left,) = outcome_of(NAME, args)
    (want,), (stepped,) = meaning_of(NAME, args)
    near(got[:5], want[:5], 1e-6)
    written = targets(args, [3, 2])
    assert torch.equal(left[written].double(), stepped[written])
    untouched(left, [*written, *args[3].tolist()])


@FLOATS
def test_the_outputs_have_the_bits_of_the_form_with_records(dtype):
    args = drafts([4, 1, 5], dtype=dtype, past=2)
    (want,), _ = outcome_of("short_conv_verify", [*args[:5], torch.zeros(24, J, 24)])
    (got,), _ = outcome_of(NAME, args)
    assert torch.equal(got, want)


@pytest.mark.parametrize("place", [-1, 24])
def test_a_slot_that_does_not_exist_gets_no_window(place):
    args = drafts([2])
    args[5][0, 1] = place
    room = torch.full((26, 2, 3, 24), torch.nan)  # a slot before the pool and one behind
    room[1:-1, 0] = args[2]
    args[2] = room[1:-1, 0]
    (got,), (left,) = outcome_of(NAME, args)
    (want,), _ = meaning_of("short_conv", args[:5])
    near(got[:2], want[:2], 1e-6)
    kept = [*args[3].tolist(), int(args[5][0, 0])]
    untouched(left.as_strided(room[:, 0].shape, room[:, 0].stride(), 0), [1 + s for s in kept])


@pytest.mark.parametrize("own", [(), ((0, 0),)], ids=str)
def test_more_tokens_than_slots_are_computed_and_leave_no_window(own):
    args = drafts([5], own)
    args[5] = args[5][:, :2]
    (got,), (left,) = outcome_of(NAME, args)
    (want,), _ = meaning_of("short_conv", args[:5])
    near(got[:5], want[:5], 1e-6)
    untouched(left, [*args[3].tolist(), *args[5][0].tolist()])


def test_columns_of_a_wider_table_are_read_where_they_lie():
    args = drafts([3, 5], past=0)
    args[5] = torch.stack([args[5], torch.zeros_like(args[5])], 2)[:, :, 0]
    check_op(NAME, torch.float32, [x.nan_to_num() if x.is_floating_point() else x for x in args])


def test_rows_of_a_window_may_lie_apart():
    args = drafts([3, 5], own=((0, 0),), past=0)
    args[0], (slots, *rows) = args[0].clone(), args[2].shape
    room = torch.full((slots, rows[0], 2, rows[1]), 7.0)
    room[:, :, 0] = args[2].nan_to_num()
    args[2] = room[:, :, 0]
    _, (left,) = check_op(NAME, torch.float32, args)
    assert (left.as_strided(room.shape, room.stride(), 0)[:, :, 1] == 7.0).all(), "beside a row"


def test_a_pool_of_another_dtype_keeps_it():
    args = drafts([3, 1], past=0, dtype=torch.bfloat16)
    args[2] = args[2].float()
    (got,), (left,) = outcome_of(NAME, args)
    (want,), (stepped,) = meaning_of(NAME, args)
    near(got, want, 5e-3)
    written = targets(args, [3, 1])
    assert left.dtype == torch.float32
    assert torch.equal(left[written].double(), stepped[written])


@FLOATS
def test_errors_are_no_larger_than_the_meanings(dtype):
    calls = []
    for seed in range(6):
        args = drafts([5, 4], dtype=dtype, past=0, seed=seed, channels=200)
        calls.append([*args[:2], args[2].nan_to_num(), *args[3:]])
    assert max(error_ratios(NAME, calls)) <= 1.1


def test_what_does_not_fit_is_refused(monkeypatch):
    from k3compile.kernels import conv_triton

    objection = OPS[NAME].implementations["triton"].objection
    args = drafts([2])
    assert objection(*args) == "cpu tensors"
    monkeypatch.setattr(conv_triton, "no_gpu", lambda *tensors: None)
    assert objection(*args) is None
    assert "float64" in objection(*args[:2], args[2].double(), *args[3:])
    assert "slots has elements 2 apart" in objection(*args[:3], torch.zeros(4)[::2].long()[::2], *args[4:])
    assert "multiple of 16 bytes" in objection(args[0][:, 1:], *args[1:])
    assert "window has elements 3 apart" in objection(*args[:2], args[2].mT.contiguous().mT, *args[3:])
