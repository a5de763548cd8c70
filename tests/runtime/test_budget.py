"""The budget rules as arithmetic."""

import pytest
from k3compile.runtime.budget import DraftCost, Limits


def test_a_draft_of_k_costs_k_minus_one_rows_and_k_of_look_ahead():
    assert DraftCost.of(8) == DraftCost(extra_rows=7, lookahead=8)
    assert DraftCost.of(0) == DraftCost()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be at least 1"),
        ({"long_prefill_tokens": 0}, "long_prefill_tokens must be at least 1"),
        (
            {"draft": DraftCost.of(8), "max_num_seqs": 1024, "adaptive_budget": False},
            "reserve 7 rows for each of 1024 requests",
        ),
        ({"draft": DraftCost.of(8), "max_num_batched_tokens": 7}, "reserve 7 rows a request"),
        ({"draft": DraftCost.of(8), "draft_limit": 7}, "does not hold one request's look-ahead of 8"),
    ],
)
def test_a_budget_that_starves_everybody_is_refused(more, message):
    with pytest.raises(ValueError, match=message):
        Limits(**more)


def test_all_contradictions_come_in_one_error():
    with pytest.raises(ValueError, match=r"max_num_seqs.*; long_prefill_tokens"):
        Limits(max_num_seqs=0, long_prefill_tokens=0)


def test_the_draft_pass_limits_how_many_run_and_nothing_else():
    limits = Limits(max_num_batched_tokens=8192, max_num_seqs=1024, draft=DraftCost.of(8), draft_limit=100)
    assert limits.max_active == 12
    assert limits.step_budget == 8192


def test_nobody_runs_whom_no_step_has_a_row_for():
    assert Limits(max_num_batched_tokens=5, max_num_seqs=16).max_active == 5
