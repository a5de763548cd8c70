"""The judge excuses ties and nothing else."""

import pytest
import torch
from tie_aware import Reference, Verdict, assert_identical, first_ones, judge

WIDE, NARROW = 0.5, 1e-6


def reference(gap=1.0, router_gaps=None) -> Reference:
    """Three prompt tokens, four outputs, two MoE layers, two experts a token; output 2 has the gap."""
    best = [[(10 + i, -1.0), (20 + i, -1.0 - (gap if i == 2 else 1.0))] for i in range(4)]
    experts = torch.tensor([0, 1]).expand(6, 2, 2)
    return Reference(3, [10, 11, 12, 13], best, experts, router_gaps or torch.full((6, 2), WIDE))


def with_experts(*places):
    experts = reference().experts.clone()
    for position, layer in places:
        experts[position, layer] = torch.tensor([0, 5])
    return experts


def with_gaps(**narrow):
    gaps = torch.full((6, 2), WIDE)
    for place in narrow.values():
        gaps[place] = NARROW
    return gaps


def test_equal_tokens_are_the_same_whatever_the_experts():
    assert judge(reference(), [10, 11, 12, 13], with_experts((0, 0))) == Verdict("same")


def test_the_order_of_a_tokens_experts_means_nothing():
    swapped = reference().experts.flip(-1)
    assert judge(reference(), [10, 11, 22, 13], swapped).kind == "wrong"


def test_the_runner_up_of_a_close_race_is_a_tie():
    assert judge(reference(gap=9e-5), [10, 11, 22, 7], reference().experts) == Verdict("tie", 2)


@pytest.mark.parametrize(
    ("gap", "token"), [(2e-4, 22), (9e-5, 33)], ids=["the race was not close", "not the runner-up"]
)
def test_other_tokens_are_wrong(gap, token):
    assert judge(reference(gap), [10, 11, token, 7], reference().experts) == Verdict("wrong", 2)


def test_a_close_race_later_does_not_excuse_an_earlier_difference():
    assert judge(reference(gap=9e-5), [10, 21, 22, 7], reference().experts) == Verdict("wrong", 1)


def test_a_missing_or_extra_token_is_wrong():
    assert judge(reference(), [10, 11, 12], reference().experts) == Verdict("wrong", 3)
    assert judge(reference(), [10, 11, 12, 13, 14], reference().experts) == Verdict("wrong", 4)


def test_experts_that_differed_at_an_undecided_router_are_an_excuse():
    undecided = Reference(*reference()[:4], with_gaps(a=(1, 0)))
    assert judge(undecided, [10, 11, 33, 13], with_experts((1, 0))) == Verdict("experts", 2)


def test_what_an_excused_difference_may_have_caused_is_excused_too():
    undecided = Reference(*reference()[:4], with_gaps(a=(1, 0)))
    assert judge(undecided, [10, 11, 33, 13], with_experts((1, 0), (1, 1), (4, 1))).kind == "experts"


@pytest.mark.parametrize(
    "places",
    [[(0, 0)], [(1, 0), (0, 1)], [(1, 0), (3, 0)], [(2, 1)]],
    ids=["elsewhere", "an earlier position", "same layer later", "decided router"],
)
def test_experts_that_differed_at_a_decided_router_are_none(places):
    undecided = Reference(*reference()[:4], with_gaps(a=(1, 0)))
    assert judge(undecided, [10, 11, 33, 13], with_experts(*places)) == Verdict("wrong", 2)


def test_an_undecided_router_without_a_difference_is_no_excuse():
    undecided = Reference(*reference()[:4], with_gaps(a=(1, 0)))
    assert judge(undecided, [10, 11, 33, 13], reference().experts) == Verdict("wrong", 2)


def test_experts_that_differ_after_the_token_are_no_excuse():
    undecided = Reference(*reference()[:4], with_gaps(a=(5, 0)))
    assert judge(undecided, [10, 11, 33, 13], with_experts((5, 0))) == Verdict("wrong", 2)


def test_first_differences_are_those_with_nothing_before_and_below():
    differs = torch.tensor([[0, 1, 0], [1, 0, 1], [0, 1, 1]], dtype=torch.bool)
    assert first_ones(differs).tolist() == [
        [False, True, False],
        [True, False, False],
        [False, False, False],
    ]


def test_one_in_ten_may_be_excused_and_they_are_counted():
    verdicts = [Verdict("same")] * 9 + [Verdict("tie", 3)]
    assert assert_identical(verdicts) == {"same": 9, "tie": 1, "experts": 0}
    with pytest.raises(AssertionError, match="2 of 10 excused"):
        assert_identical([*verdicts[1:], Verdict("experts", 1)])
    with pytest.raises(AssertionError, match=r"without an excuse: \{1: Verdict\(kind='wrong', at=0\)\}"):
        assert_identical([Verdict("same"), Verdict("wrong", 0)])
