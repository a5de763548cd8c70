"""The budget rules as arithmetic, and where a prefill chunk may end."""

import pytest
from k3compile.runtime.budget import DraftCost, Limits, chunk, last_checkpoint


def chunks(prompt: int, granule: int, budget: int) -> list[int]:
    """Chunk lengths of a lone prompt."""
    seen, lengths = 0, []
    while seen < prompt:
        lengths.append(chunk(seen, min(prompt - seen, budget), prompt, granule))
        seen += lengths[-1]
    return lengths


@pytest.mark.parametrize(
    ("prompt", "granule", "budget", "expected"),
    [
        (8000, 768, 8185, [7680, 320]),
        (8000, 1536, 8186, [7680, 320]),
        (8000, 1536, 2048, [1536] * 5 + [320]),
        (8000, 1536, 1024, [1024, 512] * 5 + [320]),
        (7680, 1536, 8185, [6144, 1536]),
        (1536, 1536, 8185, [1536]),
        (12000, 768, 8185, [7680, 3840, 480]),
        (5000, 1, 2048, [2048, 2048, 904]),
        (1535, 1536, 8185, [1535]),
        (1537, 1536, 8185, [1536, 1]),
    ],
)
def test_the_worked_examples_of_the_chunk_rule(prompt, granule, budget, expected):
    assert chunks(prompt, granule, budget) == expected


@pytest.mark.parametrize("granule", [2, 3, 64, 1536])
@pytest.mark.parametrize("budget", [1, 5, 63, 64, 65, 1535, 1537])
def test_every_chunk_makes_progress_and_passes_no_boundary_without_need(granule, budget):
    for prompt in (1, 2, granule, granule + 1, 4 * granule - 1, 4 * granule, 4 * granule + 1):
        seen = 0
        ends = set()
        for length in chunks(prompt, granule, budget):
            assert 1 <= length <= budget
            seen += length
            ends.add(seen)
        assert seen == prompt
        last = last_checkpoint(prompt, granule)
        assert last == 0 or last in ends
        if budget < granule:  # then each boundary is a stop
            assert ends >= set(range(granule, last + 1, granule))


def test_the_last_checkpoint_leaves_a_token_to_run():
    assert [last_checkpoint(n, 64) for n in (1, 63, 64, 65, 128, 129)] == [0, 0, 0, 64, 64, 128]


def test_a_draft_of_k_costs_k_minus_one_rows_and_k_of_look_ahead():
    assert DraftCost.of(8) == DraftCost(extra_rows=7, lookahead=8)
    assert DraftCost.of(0) == DraftCost()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be at least 1"),
        ({"granule": 0}, "granule must be at least 1"),
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
    with pytest.raises(ValueError, match=r"max_num_seqs.*; granule"):
        Limits(max_num_seqs=0, granule=0)


def test_the_draft_pass_limits_how_many_run_and_nothing_else():
    limits = Limits(max_num_batched_tokens=8192, max_num_seqs=1024, draft=DraftCost.of(8), draft_limit=100)
    assert limits.max_active == 12
    assert limits.step_budget == 8192


def test_nobody_runs_whom_no_step_has_a_row_for():
    assert Limits(max_num_batched_tokens=5, max_num_seqs=16).max_active == 5
