"""Penalties and bias, against a row-by-row reference and against transformers."""

import random

import pytest
import torch
from k3compile.runtime.penalties import adjust
from k3compile.runtime.request import Request, SamplingParams

V = 50
EOS = frozenset([0, 1])


def request(prompt, output=(), **params) -> Request:
    made = Request("a", prompt, SamplingParams(**params))
    made.tokens.extend(output)
    return made


def reference(scores: list[float], r: Request) -> list[float]:
    """The definition, one id at a time."""
    p, scores = r.params, list(scores)
    for i in range(V):
        if i in r.prompt or i in r.output:
            scores[i] = (
                scores[i] / p.repetition_penalty if scores[i] > 0 else scores[i] * p.repetition_penalty
            )
        times = r.output.count(i)
        scores[i] -= p.frequency_penalty * times + p.presence_penalty * (times > 0)
        scores[i] += p.logit_bias.get(i, 0.0)
        stops = set(p.stop_token_ids) | (set() if p.ignore_eos else EOS)
        if r.output_tokens < p.min_tokens and i in stops:
            scores[i] = float("-inf")
    return scores


def random_request(rng: random.Random) -> Request:
    def maybe(value, neutral):
        return value if rng.random() < 0.6 else neutral

    return request(
        [rng.randrange(V) for _ in range(rng.randint(1, 20))],
        [rng.randrange(V) for _ in range(rng.randint(0, 20))],
        repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        logit_bias=maybe({rng.randrange(V): rng.uniform(-100, 100) for _ in range(5)}, {}),
        min_tokens=maybe(rng.randint(0, 30), 0),
        stop_token_ids=maybe((3, 4), ()),
        ignore_eos=rng.random() < 0.5,
    )


@pytest.mark.parametrize("seed", range(10))
def test_mixed_rows_equal_the_definition_row_by_row(seed):
    rng = random.Random(seed)
    requests = [random_request(rng) for _ in range(9)]
    scores = torch.randn(9, V, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 3
    expected = torch.tensor([reference(row, r) for row, r in zip(scores.tolist(), requests)]).double()
    torch.testing.assert_close(adjust(scores, requests, EOS), expected, rtol=1e-6, atol=1e-6)


def test_the_scores_that_came_in_are_left_alone():
    scores = torch.randn(1, V)
    before = scores.clone()
    adjust(scores, [request([1, 2], logit_bias={3: 5.0})], EOS)
    assert torch.equal(scores, before)


def test_without_a_wish_nothing_is_copied():
    scores = torch.randn(2, V)
    assert adjust(scores, [request([1]), request([2])], EOS) is scores


@pytest.mark.oracle
@pytest.mark.parametrize("penalty", [0.7, 1.3, 5.0])
def test_repetition_equals_transformers(penalty):
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    prompt, output = [3, 9, 9, 20], [7, 3, 49]
    scores = torch.randn(1, V, generator=torch.Generator().manual_seed(1))
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), scores.clone())
    ours = adjust(scores, [request(prompt, output, repetition_penalty=penalty)], EOS)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.oracle
def test_min_tokens_equals_transformers():
    from transformers.generation.logits_process import MinNewTokensLengthLogitsProcessor

    for done in range(5):
        output = [7] * done
        scores = torch.randn(1, V, generator=torch.Generator().manual_seed(done))
        processor = MinNewTokensLengthLogitsProcessor(2, 3, sorted(EOS), device="cpu")
        theirs = processor(torch.tensor([[5, 6, *output]]), scores.clone())
        ours = adjust(scores, [request([5, 6], output, min_tokens=3)], EOS)
        assert torch.equal(ours, theirs)


def test_a_request_without_output_has_nothing_to_count():
    scores = torch.randn(1, V)
    ours = adjust(scores, [request([4, 5], frequency_penalty=1.0, presence_penalty=1.0)], EOS)
    assert torch.equal(ours, scores)


@pytest.mark.parametrize("seed", range(6))
def test_a_row_after_drafts_is_one_of_a_request_that_has_generated_them(seed):
    rng = random.Random(100 + seed)
    requests, ahead, told = [], [], []
    for _ in range(4):
        owner = random_request(rng)
        drafts = [rng.randrange(V) for _ in range(rng.randint(0, 4))]
        for i in range(len(drafts) + 1):
            requests.append(owner)
            ahead.append(drafts[:i])
            later = Request("b", owner.prompt, owner.params)
            later.tokens.extend(owner.output + drafts[:i])
            told.append(later)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(len(requests), V, dtype=torch.float64, generator=generator) * 3
    expected = torch.tensor([reference(row, r) for row, r in zip(scores.tolist(), told)]).double()
    torch.testing.assert_close(adjust(scores, requests, EOS, ahead), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(adjust(scores, requests, EOS, ahead), adjust(scores, told, EOS))


def test_drafts_count_towards_the_least_number_of_tokens():
    owner = request([5], [6], min_tokens=3, stop_token_ids=(4,))
    rows = adjust(torch.zeros(4, V), [owner] * 4, EOS, [[], [7], [7, 8], [7, 8, 9]])
    assert [bool(row[4] == -torch.inf) for row in rows] == [True, True, False, False]
    assert [bool(row[0] == -torch.inf) for row in rows] == [True, True, False, False]
