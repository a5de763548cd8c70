"""Verification leaves the model's distribution as it is: enumerated, with every draft and every outcome."""

import itertools
import math

import pytest
import torch
from enumerate_verification import (
    all_drafts,
    one_hot_error,
    outcomes,
    random_tree,
    rows_along,
    sampled_error,
    sequence_probabilities,
)
from k3compile.runtime.request import Request, SamplingParams
from k3compile.runtime.sampler import distribution
from k3compile.runtime.speculate import verify as rules
from k3compile.runtime.speculate.verify import match, verify

V = 5
LIMIT = 1e-12
RULES = ["standard", "block"]
SHAPES = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 2},
    "all": {"temperature": 0.6, "top_k": 4, "top_p": 0.8, "min_p": 0.1},
}


def shaped(name: str):
    owner = Request("a", [1], SamplingParams(**SHAPES[name]))
    return lambda logits: distribution(logits, [owner] * len(logits))


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("ours", "drafts"), [("plain", "plain"), ("top_p", "hot"), ("top_k", "plain"), ("all", "top_k")]
)
def test_drafts_drawn_from_another_model_change_nothing(rule, gamma, ours, drafts):
    model = random_tree(V, gamma + 1, 3 * gamma, shaped(ours))
    draft = random_tree(V, gamma, 100 + gamma, shaped(drafts))
    error, _ = sampled_error(rule, model, draft)
    assert error < LIMIT


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("ours", sorted(SHAPES))
def test_any_draft_that_was_not_drawn_changes_nothing(rule, gamma, ours):
    error, _ = one_hot_error(rule, random_tree(V, gamma + 1, 7 * gamma, shaped(ours)))
    assert error < LIMIT


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_block_keeps_at_least_as_many_as_standard(gamma, seed):
    model = random_tree(V, gamma + 1, seed, shaped("plain"))
    draft = random_tree(V, gamma, 50 + seed, shaped("plain"))
    kept = {rule: sampled_error(rule, model, draft)[1] for rule in RULES}
    assert kept["block"] >= kept["standard"] - LIMIT
    if gamma > 1:
        assert kept["block"] > kept["standard"] + 1e-4
    one_hot = {rule: one_hot_error(rule, model)[1] for rule in RULES}
    assert (one_hot["block"] >= one_hot["standard"] - LIMIT).all()


def target_itself(target, drafts, proposed, accepted, scale):
    return target[torch.arange(len(target)), accepted]


@pytest.mark.parametrize("rule", RULES)
def test_a_verifier_that_forgets_the_residual_fails_the_enumeration(rule, monkeypatch):
    monkeypatch.setattr(rules, "residual", target_itself)
    model, draft = random_tree(V, 3, 1, shaped("plain")), random_tree(V, 2, 2, shaped("plain"))
    assert sampled_error(rule, model, draft)[0] > 1e-3
    assert one_hot_error(rule, model)[0] > 1e-3


def test_block_chances_with_an_early_stop_fail_the_enumeration(monkeypatch):
    monkeypatch.setattr(rules, "last", rules.prefix)
    model, draft = random_tree(V, 3, 1, shaped("plain")), random_tree(V, 2, 2, shaped("plain"))
    assert sampled_error("block", model, draft)[0] > 1e-3
    assert one_hot_error("block", model)[0] > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_the_wrong_draft_distribution_fails_the_enumeration(rule):
    """Drafts drawn with temperature and judged as if drawn without."""
    model, drafts = random_tree(V, 3, 1, shaped("plain")), all_drafts(V, 2)
    drawn, claimed = (random_tree(V, 2, 2, shaped(name)) for name in ("hot", "plain"))
    table, _ = outcomes(rule, model, drafts, rows_along(claimed, drafts))
    total = (sequence_probabilities(drawn)[:, None] * table).sum(0)
    assert float((total - sequence_probabilities(model)).abs().max()) > 1e-3


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("one_hot", [True, False])
def test_rows_of_different_lengths_are_judged_as_if_alone(rule, one_hot):
    generator = torch.Generator().manual_seed(5)
    lengths, k = [3, 1, 4, 2, 4], 4
    target = torch.rand(5, k + 1, V, generator=generator, dtype=torch.float64)
    proposed = torch.rand(5, k, V, generator=generator, dtype=torch.float64)
    target, proposed = target / target.sum(-1, keepdim=True), proposed / proposed.sum(-1, keepdim=True)
    drafts = torch.randint(V, (5, k), generator=generator)
    uniforms = torch.rand(5, k, generator=generator, dtype=torch.float64) * 0.2
    padded, seen = drafts.clone(), set()
    for row, length in enumerate(lengths):
        padded[row, length:] = -1
        target[row, length + 1 :] = math.nan  # nobody may look there
        proposed[row, length:] = math.nan
    together = verify(rule, target, padded, None if one_hot else proposed, uniforms)
    for row, n in enumerate(lengths):
        q = None if one_hot else proposed[row : row + 1, :n]
        alone = verify(
            rule, target[row : row + 1, : n + 1], drafts[row : row + 1, :n], q, uniforms[row : row + 1, :n]
        )
        assert together.accepted[row] == alone.accepted[0]
        torch.testing.assert_close(together.after[row], alone.after[0], rtol=0, atol=1e-15)
        seen.add(int(alone.accepted[0]))
    assert len(seen) > 1


@pytest.mark.parametrize("rule", RULES)
def test_a_one_hot_draft_equals_a_distribution_with_all_its_mass_in_one_place(rule):
    generator = torch.Generator().manual_seed(6)
    target = torch.rand(64, 4, V, generator=generator, dtype=torch.float64)
    target /= target.sum(-1, keepdim=True)
    drafts = torch.randint(V, (64, 3), generator=generator)
    uniforms = torch.rand(64, 3, generator=generator, dtype=torch.float64) * 0.3
    spelled_out = torch.nn.functional.one_hot(drafts, V).double()
    closed, full = (
        verify(rule, target, drafts, None, uniforms),
        verify(rule, target, drafts, spelled_out, uniforms),
    )
    assert torch.equal(closed.accepted, full.accepted)
    torch.testing.assert_close(closed.after, full.after, rtol=0, atol=1e-14)
    assert closed.accepted.unique().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", RULES)
def test_a_draft_of_the_model_itself_is_kept_whole(rule, dtype):
    rows = (
        torch.rand(200, 5, V, dtype=dtype, generator=torch.Generator().manual_seed(1)).log_softmax(-1).exp()
    )
    drafts = rows[:, :-1].reshape(-1, V).multinomial(1).view(200, 4)
    outcome = verify(rule, rows, drafts, rows[:, :-1], torch.full((200, 4), 1 - 2**-53, dtype=torch.float64))
    assert (outcome.accepted == 4).all()
    torch.testing.assert_close(outcome.after, rows[:, -1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "proposed", [[1.0, 0, 0, 0, 0], [0.0, 1, 0, 0, 0], [0.5, 0.5, 0, 0, 0], [1.0, 1e-45, 0, 0, 0]]
)
def test_zeroes_on_either_side_never_let_an_impossible_token_out(rule, proposed, dtype):
    """b(x) = 0, s(x) = 0, both, and u = 0: no NaN, and nothing that the model would not draw."""
    target = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0], dtype=dtype).expand(25, 3, V)
    drafts = torch.tensor(list(itertools.product(range(V), repeat=2)))
    q = torch.tensor(proposed, dtype=dtype).expand(25, 2, V)
    for u in (0.0, 0.5, 1 - 2**-53):
        for given in (q, None):
            outcome = verify(rule, target, drafts, given, torch.full((25, 2), u, dtype=torch.float64))
            assert torch.equal(outcome.after, target[:, 0])
            for row, kept in zip(drafts.tolist(), outcome.accepted.tolist()):
                assert row[:kept] == [1] * kept


@pytest.mark.parametrize("rule", RULES)
def test_what_is_left_by_rounding_alone_falls_back_to_the_target(rule):
    target = torch.tensor([[[1 - 2e-16, 0.0], [0.5, 0.5]]], dtype=torch.float64)
    outcome = verify(
        rule, target, torch.tensor([[0]]), None, torch.tensor([[1 - 2**-53]], dtype=torch.float64)
    )
    assert outcome.accepted.tolist() == [0]
    assert outcome.after.tolist() == [[1.0, 0.0]]


def test_single_precision_agrees_with_double_in_a_large_vocabulary():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(8, 6, 20_000, generator=generator, dtype=torch.float64) * 3
    target, proposed = (
        logits.softmax(-1),
        (logits[:, :5] + torch.randn(8, 5, 20_000, generator=generator)).softmax(-1),
    )
    drafts = proposed.reshape(-1, 20_000).multinomial(1, generator=generator).view(8, 5)
    live = torch.ones_like(drafts, dtype=torch.bool)
    for rule in rules.RULES.values():
        wide = rule(target, drafts, live, proposed).accept
        narrow = rule(target.float(), drafts, live, proposed.float()).accept
        torch.testing.assert_close(narrow, wide, rtol=1e-4, atol=1e-5)


def test_matching_keeps_what_the_model_would_have_chosen_itself():
    chosen = [4, 2, 7, 9]
    assert [match(chosen, d) for d in ([4, 2, 7], [4, 3, 7], [1, 2, 7], [4, 2])] == [3, 1, 0, 2]
    assert match([4], []) == 0


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_distribution_that_is_not_finite_is_rejected_for_the_target(rule):
    target = torch.rand(8, 3, V, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    target /= target.sum(-1, keepdim=True)
    drafts, broken = (
        torch.zeros(8, 2, dtype=torch.int64),
        torch.full((8, 2, V), math.nan, dtype=torch.float64),
    )
    outcome = verify(rule, target, drafts, broken, torch.zeros(8, 2, dtype=torch.float64))
    assert outcome.accepted.tolist() == [0] * 8
    torch.testing.assert_close(outcome.after, target[:, 0], rtol=0, atol=1e-15)


def test_ratios_are_numbers_whatever_is_divided_by_nothing():
    b, s = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]]), torch.tensor([[[0.0, 1.0]]])
    assert rules.ratios(b, torch.tensor([[0]]), s).tolist() == [[0.0]]
    assert rules.ratios(b, torch.tensor([[1]]), s).tolist() == [[1.0]]
    assert rules.ratios(b, torch.tensor([[1]]), s.flip(-1)).tolist() == [[torch.finfo(torch.float64).max]]
