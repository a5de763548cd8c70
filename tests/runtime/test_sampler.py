"""Choosing tokens: distributions against transformers and a naive reference, chance by statistics, seeds,
log-probs.
"""

import math
import random

import pytest
import torch
from k3compile.runtime.request import Request, SamplingParams
from k3compile.runtime.sampler import Sampler, distribution, pick

V = 60
CHI_SQUARE_999 = {3: 16.27, 9: 27.88, 59: 98.32}  # 0.999 quantile by degrees of freedom, from a table


def request(name="a", **params) -> Request:
    return Request(name, [1], SamplingParams(**params))


def logits(rows: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 3


def naive(row: list[float], p: SamplingParams) -> list[float]:
    """Temperature, top-k, top-p, min-p by the book, on one row."""
    scaled = [x / p.temperature for x in row]
    if p.top_k:
        worst = sorted(scaled, reverse=True)[: p.top_k][-1]
        scaled = [x if x >= worst else -math.inf for x in scaled]
    mass = softmax(scaled)
    kept, total = set(), 0.0
    for i in sorted(range(len(mass)), key=lambda i: (-mass[i], i)):
        if total >= p.top_p and p.top_p < 1:
            break
        kept.add(i)
        total += mass[i]
    kept = {i for i in kept if mass[i] >= p.min_p * max(mass)}
    return softmax([x if i in kept else -math.inf for i, x in enumerate(scaled)])


def softmax(row: list[float]) -> list[float]:
    exps = [math.exp(x - max(row)) for x in row]
    return [e / sum(exps) for e in exps]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(8))
def test_rows_with_different_parameters_equal_the_reference_row_by_row(seed, dtype):
    rng = random.Random(seed)
    requests = [
        request(
            temperature=rng.choice([0.1, 0.7, 1.0, 3.0]),
            top_k=rng.choice([0, 1, 5, V - 1, V, 1000]),
            top_p=rng.choice([0.05, 0.5, 0.9, 1.0]),
            min_p=rng.choice([0.0, 0.1, 1.0]),
        )
        for _ in range(12)
    ]
    scores = logits(12, seed, dtype)
    expected = torch.tensor([naive(row, r.params) for row, r in zip(scores.tolist(), requests)], dtype=dtype)
    torch.testing.assert_close(distribution(scores, requests), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.oracle
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 7},
        {"top_p": 0.6},
        {"top_p": 0.99},
        {"min_p": 0.05},
        {"top_k": 9, "top_p": 0.8, "min_p": 0.2},
    ],
)
def test_the_distribution_equals_transformers(temperature, params):
    from transformers.generation import logits_process as theirs

    warpers = [theirs.TemperatureLogitsWarper(temperature)]
    if "top_k" in params:
        warpers.append(theirs.TopKLogitsWarper(params["top_k"]))
    if "top_p" in params:
        warpers.append(theirs.TopPLogitsWarper(params["top_p"]))
    if "min_p" in params:
        warpers.append(theirs.MinPLogitsWarper(params["min_p"]))
    scores = logits(16, seed=5)
    warped = scores.clone()
    for warper in warpers:
        warped = warper(None, warped)
    ours = distribution(scores, [request(temperature=temperature, **params)] * 16)
    torch.testing.assert_close(ours, warped.softmax(-1))


def test_top_p_stops_where_its_mass_is_reached_exactly_and_takes_equal_ids_in_order():
    probabilities = distribution(torch.zeros(1, 4), [request(top_p=0.5)])
    assert probabilities.tolist() == [[0.5, 0.5, 0.0, 0.0]]


@pytest.mark.parametrize("p", [0.1, 0.9, 0.99])
def test_top_p_of_a_peaked_row_in_a_large_vocabulary_equals_a_full_sort(p):
    """Here the sort is cut short; ties at the border included."""
    scores = torch.randn(3, 20_000, generator=torch.Generator().manual_seed(2)) * 6
    scores[1] = scores[1].round()
    got = distribution(scores, [request(top_p=p)] * 3)
    for row, ours in zip(scores, got):
        mass, order = row.double().softmax(-1).sort(descending=True, stable=True)
        kept = order[mass.cumsum(0) - mass < p]
        assert len(kept) < 5000
        assert set(ours.nonzero()[:, 0].tolist()) == set(kept.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1e-9, 1e-40, 1e-46, 5e-324])
def test_the_smallest_temperature_is_greedy_and_not_nan(temperature, dtype):
    scores = logits(4, dtype=dtype)
    plain, cut = request(temperature=temperature), request(temperature=temperature, top_p=0.5, top_k=3)
    probabilities = distribution(scores, [plain, cut, plain, cut])
    assert torch.equal(probabilities.argmax(-1), scores.argmax(-1))
    torch.testing.assert_close(probabilities.amax(-1), torch.ones(4, dtype=dtype))


def test_greedy_takes_the_lowest_of_equal_ids_in_any_width():
    for width in (3, 64, 1000, 163_840):
        scores = torch.zeros(1, width)
        scores[0, [width // 2, width - 1]] = 5.0
        assert Sampler().sample(scores, [request(temperature=0.0)])[0].tokens[0] == width // 2
    assert Sampler().sample(torch.zeros(1, 163_840), [request(temperature=0.0)])[0].tokens[0] == 0


def test_greedy_ignores_whatever_only_concerns_chance():
    scores = logits(2)
    plain = Sampler().sample(scores, [request(temperature=0.0)] * 2)
    odd = Sampler().sample(scores, [request(temperature=0.0, top_k=3, top_p=0.1, min_p=0.5, seed=4)] * 2)
    assert plain == odd


def test_picking_walks_the_cumulated_probabilities():
    probabilities = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]).expand(6, 5)
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.9999, 1 - 2**-53, 0.5], dtype=torch.float64)
    assert pick(probabilities, uniforms).tolist() == [1, 1, 3, 3, 3, 3]


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> tuple[float, int]:
    assert counts[expected == 0].sum() == 0
    counts, expected = counts[expected > 0], expected[expected > 0]
    return float(((counts - expected) ** 2 / expected).sum()), len(expected) - 1


@pytest.mark.parametrize(
    ("params", "kept"), [({}, V), ({"top_k": 10}, 10), ({"temperature": 1.5, "top_k": 4, "seed": 9}, 4)]
)
def test_tokens_come_as_often_as_their_probability_says(params, kept):
    draws = 20_000
    params = {"seed": 3, **params}
    scores = logits(1) / 3
    sampler, owner = Sampler(), request(**params)
    expected = distribution(scores, [owner])[0].double() * draws
    assert int((expected > 0).sum()) == kept
    uniforms = torch.tensor(sampler.chance(owner).take(draws), dtype=torch.float64)
    counts = torch.bincount(pick(distribution(scores, [owner]).expand(draws, V), uniforms), minlength=V)
    statistic, freedom = chi_square(counts, expected)
    assert statistic < CHI_SQUARE_999[freedom]


def test_a_seed_gives_the_same_tokens_in_whatever_company():
    def tokens(company: int, place: int) -> list[int]:
        sampler = Sampler()
        others = [request(f"o{i}", temperature=0.9) for i in range(company)]
        mine = request("mine", seed=42)
        rows = [*others[:place], mine, *others[place:]]
        out = []
        for step in range(20):
            scores = logits(len(rows), seed=1000 + step)
            scores[place] = logits(1, seed=step)[0]
            out.append(sampler.sample(scores, rows)[place].tokens[0])
        return out

    alone = tokens(0, 0)
    assert tokens(3, 0) == tokens(3, 3) == tokens(7, 5) == alone
    assert len(set(alone)) > 3


def test_unseeded_requests_differ_from_one_another_and_from_run_to_run():
    scores = torch.zeros(1, V)

    def run():
        sampler, owner = Sampler(), request()
        return tuple(sampler.sample(scores, [owner])[0].tokens[0] for _ in range(20))

    assert len({run() for _ in range(5)}) == 5


def test_negative_and_huge_seeds_work():
    for seed in (-(2**63), -1, 2**64 - 1):
        assert 0 <= Sampler().sample(torch.zeros(1, V), [request(seed=seed)])[0].tokens[0] < V


def test_a_finished_requests_generator_is_not_kept():
    sampler = Sampler()
    for i in range(50):
        sampler.sample(torch.zeros(1, V), [request(f"r{i}")])
    assert len(sampler._chances) <= 1


def test_logprobs_are_the_models_own_before_penalties_and_temperature():
    scores = logits(2)
    scores[0, 7] = scores[0].max() + 2
    rows = [
        request(temperature=0.0, logprobs=3, logit_bias={7: -50.0}),
        request(temperature=5.0, top_k=1, logprobs=0),
    ]
    first, second = Sampler().sample(scores, rows)
    table = scores.double().log_softmax(-1)
    assert first.tokens != [7]
    assert first.logprobs[0].token == first.tokens[0]
    assert first.logprobs[0].logprob == pytest.approx(table[0, first.tokens[0]].item(), abs=1e-5)
    assert [i for i, _ in first.logprobs[0].top] == table[0].topk(3).indices.tolist()
    assert first.logprobs[0].top[0][0] == 7
    assert second.logprobs[0].top == ()
    assert second.logprobs[0].logprob == pytest.approx(table[1].max().item(), abs=1e-5)


def test_equal_logprobs_are_listed_by_id():
    scores = torch.zeros(1, V)
    scores[0, [9, 30, 31]] = 1.0
    (choice,) = Sampler().sample(scores, [request(temperature=0.0, logprobs=5)])
    assert [i for i, _ in choice.logprobs[0].top] == [9, 30, 31, 0, 1]


def test_more_logprobs_than_the_vocabulary_has_list_all_of_it():
    (choice,) = Sampler().sample(logits(1), [request(logprobs=100)])
    assert len(choice.logprobs[0].top) == V
    assert sum(math.exp(p) for _, p in choice.logprobs[0].top) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 1}, {"logprobs": 2}])
def test_a_row_that_is_not_finite_is_an_error_and_its_neighbours_are_not(bad, params):
    scores = logits(3)
    alone = [Sampler().sample(scores[i : i + 1], [request(seed=1)])[0].tokens[0] for i in (0, 2)]
    scores[1, 5] = bad
    first, second, third = Sampler().sample(scores, [request(seed=1), request(**params), request(seed=1)])
    assert second.error == "the model's logits are not finite"
    assert [first.tokens[0], third.tokens[0]] == alone
    assert (first.error, third.error) == (None, None)


def test_bfloat16_logits_are_judged_in_float32():
    scores = logits(1).bfloat16()
    (choice,) = Sampler().sample(scores, [request(temperature=0.0, logprobs=1)])
    assert choice.logprobs[0].logprob == pytest.approx(scores.float().log_softmax(-1).max().item(), abs=1e-6)
