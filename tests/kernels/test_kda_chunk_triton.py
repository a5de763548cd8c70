"""Chunks of KDA in Triton, interpreted: where they are, and decays of every steepness inside them."""

import pytest
import torch
from interpreted import outcome_of
from kda_rows import check, poisoned


@pytest.mark.parametrize("length", [1, 16, 17, pytest.param(64, marks=pytest.mark.slow)])
def test_a_row_is_its_tokens_and_not_what_lies_behind_them(length):
    check("kda_prefill", poisoned([length]))


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[0, 3, 0, 66, 1], [63, 65], [1] * 6, [128, 2]], ids=str)
def test_rows_of_any_length_find_their_chunks(lengths):
    check("kda_prefill", poisoned(lengths, slots=9))


def test_no_rows_and_only_rows_of_nobody():
    check("kda_prefill", poisoned([]))
    check("kda_prefill", poisoned([0, 0], past=70))


@pytest.mark.slow
def test_bits_of_a_row_do_not_depend_on_its_neighbours():
    args = poisoned([70], past=0)
    together = poisoned([3, 70, 1], seed=1, slots=9)
    home, place = args[6][0], together[6][1]
    for alone, all_rows in zip(args[:5], together[:5]):
        all_rows[3:73] = alone
    together[5][place] = args[5][home]
    (one,), (left,) = outcome_of("kda_prefill", args)
    (three,), (stepped,) = outcome_of("kda_prefill", together)
    assert torch.equal(three[3:73], one)
    assert torch.equal(stepped[place], left[home])


@pytest.mark.parametrize("decay", [-5.0, -5.1, -104.0, -1e4, 0.0])
def test_decays_as_steep_as_they_come_stay_exact(decay):
    """At the model's bound sixteen steps are factorised; steeper ones are summed pair by pair."""
    args = poisoned([20], heads=1)
    args[3].fill_(decay)
    check("kda_prefill", args)


def test_one_steep_channel_is_enough_to_leave_the_factors():
    args = poisoned([18])
    args[3][:, :, 3] = -40.0
    args[3][::2, :, 3] = 0.0
    check("kda_prefill", args)


def test_keys_that_are_nearly_parallel_are_told_apart():
    """(I + L)^-1 is far from I: betas of nearly one, no decay."""
    args = poisoned([20])
    args[1][:20] = torch.nn.functional.normalize(args[1][:1] + 1e-2 * args[1][:20], dim=-1)
    args[3][:20], args[4][:20] = 0.0, 0.999
    check("kda_prefill", args, bound=1e-5)
