"""States of KDA carried by Triton, interpreted: halves of wide heads, and checkpoints on and off the grid."""

import pytest
import torch
from interpreted import outcome_of
from kda_rows import check, poisoned
from lanes import thinned


def with_columns(args, offsets, places):
    return [*args, *(torch.tensor(c, dtype=torch.int32) for c in (offsets, places))]


def free_slot(args):
    return next(s for s in range(1, len(args[5])) if s not in args[6].tolist())


@pytest.mark.parametrize("keys", [72, 128])
def test_wide_heads_are_carried_in_two_halves(keys):
    check("kda_prefill", poisoned([5], keys=keys, values=40))


@pytest.mark.parametrize("offset", [1, 16, 19, 20])
def test_a_checkpoint_is_left_inside_a_row_and_at_its_end(offset):
    args = poisoned([20])
    place = free_slot(args)
    check("kda_prefill_export", with_columns(args, [offset, 0], [place, 0]), more=[place])


@pytest.mark.slow
@pytest.mark.parametrize("offset", [63, 64, 65, 127, 128, 130])
def test_a_checkpoint_of_a_long_row_has_the_bits_of_a_run_that_stops_on_the_grid(offset):
    args = poisoned([2, 130])
    place = free_slot(args)
    columns = with_columns(args, [0, offset], [0, place])
    got, left = check("kda_prefill_export", columns, more=[place])
    (plain,), (stepped,) = outcome_of("kda_prefill", args)
    assert torch.equal(got, plain), "a checkpoint changed the outputs"
    assert torch.equal(left[args[6]], stepped[args[6]])
    if offset % 64 == 0 or offset == 130:
        cut = [x[2 : 2 + offset] for x in args[:5]]
        _, (stopped,) = outcome_of("kda_prefill", [*cut, args[5], args[6][1:], torch.tensor([0, offset])])
        assert torch.equal(left[place], stopped[args[6][1]])


@pytest.mark.slow
def test_checkpoints_of_wide_heads_have_both_halves():
    args = poisoned([5], keys=72)
    place = free_slot(args)
    check("kda_prefill_export", with_columns(args, [3], [place]), more=[place])
    check("kda_prefill_export", with_columns(args, [5], [place]), more=[place])


WRONG = [(7, 5), (-1, 5), (3, 70), (3, -1), (3, None)]


@pytest.mark.parametrize(("offset", "place"), thinned(WRONG, 2, several=True))
def test_a_wrong_checkpoint_is_none(offset, place):
    args = poisoned([6])
    place = int(args[6][0]) if place is None else place
    (got,), (left,) = outcome_of("kda_prefill_export", with_columns(args, [offset], [place]))
    (plain,), (stepped,) = outcome_of("kda_prefill", args)
    assert torch.equal(got, plain)
    torch.testing.assert_close(left, stepped, equal_nan=True, atol=0, rtol=0)


def test_rows_past_the_columns_leave_nothing():
    args = poisoned([2, 3])
    place = free_slot(args)
    check("kda_prefill_export", with_columns(args, [2], [place]), more=[place])
