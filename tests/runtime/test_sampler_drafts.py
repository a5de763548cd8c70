"""Drafts in the sampler: the same tokens when greedy, the same distribution by chance, the same ends."""

import math
import random

import pytest
import torch
from chi_square import fit, forget_the_residual, joint
from k3compile.runtime.penalties import adjust
from k3compile.runtime.request import Request, SamplingParams, cut
from k3compile.runtime.sampler import Chance, Sampler, distribution
from k3compile.runtime.speculate.draft import Draft

V = 12
EOS = frozenset([0])
TABLE = torch.randn(V, V, V, generator=torch.Generator().manual_seed(8)) * 2


def next_logits(tokens) -> torch.Tensor:
    """A model that looks two tokens back."""
    return TABLE[tokens[-2], tokens[-1]]


def rows_of(request: Request, count: int) -> torch.Tensor:
    history, rows = request.tokens.tolist(), []
    for token in [*request.drafts[:count], None]:
        rows.append(next_logits(history))
        history = [*history, token]
    return torch.stack(rows)


def step(sampler: Sampler, requests, counts=None):
    counts = [len(r.drafts) for r in requests] if counts is None else counts
    rows = [rows_of(r, n) for r, n in zip(requests, counts)]
    return sampler.sample(torch.cat(rows), requests, counts)


def request(name="a", prompt=(1, 2), **params) -> Request:
    return Request(name, list(prompt), SamplingParams(**params))


def generate(owner: Request, sampler: Sampler, propose, least=40) -> tuple[list, list]:
    """Tokens and logprobs of a whole answer; ``propose(request)`` gives the drafts of a step."""
    logprobs = []
    while owner.finish is None and owner.output_tokens < least:
        owner.propose(propose(owner))
        (choice,) = step(sampler, [owner])
        kept, owner.finish = cut(owner, choice.tokens, EOS, 1000)
        owner.tokens.extend(kept)
        logprobs += (choice.logprobs or [])[: len(kept)]
    return owner.output[:least], logprobs[:least]


def guesses(seed: int, most: int):
    """Drafts of random length, about half of them what the model finds best."""
    rng = random.Random(seed)

    def propose(owner: Request) -> Draft | None:
        history, drafts = owner.tokens.tolist(), []
        for _ in range(rng.randint(0, most)):
            good = int(next_logits(history).argmax())
            drafts.append(good if rng.random() < 0.7 else rng.randrange(V))
            history.append(drafts[-1])
        return Draft(drafts) if drafts else None

    return propose


WISHES = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.3},
    "least": {"min_tokens": 13, "logit_bias": {0: 4.0, 5: -2.0}, "stop_token_ids": (3,)},
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("wishes", sorted(WISHES))
def test_greedy_answers_and_their_logprobs_are_those_without_drafts(wishes, seed):
    def answer(propose):
        owner = request(prompt=(1 + seed, 2), temperature=0.0, logprobs=2, **WISHES[wishes])
        return generate(owner, Sampler(EOS), propose)

    assert answer(guesses(seed, 6)) == answer(lambda owner: None)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("wishes", sorted(WISHES))
def test_drafts_that_were_not_drawn_leave_a_seeds_tokens_alone_under_the_standard_rule(wishes, seed):
    def answer(propose):
        owner = request(temperature=0.8, top_p=0.9, seed=seed, **WISHES[wishes])
        return generate(owner, Sampler(EOS, "standard"), propose)

    assert answer(guesses(seed, 6)) == answer(lambda owner: None)


def drawn(generator: torch.Generator, k: int, temperature: float = 1.5):
    """Drafts drawn from a model of their own, with the distribution they were drawn from."""

    def propose(owner: Request) -> Draft:
        history, tokens, probs = owner.tokens.tolist(), [], []
        for _ in range(k):
            probs.append((next_logits(history).roll(1) / temperature).softmax(-1))
            tokens.append(int(probs[-1].multinomial(1, generator=generator)))
            history.append(tokens[-1])
        return Draft(tokens, torch.stack(probs))

    return propose


def everyone(seed: int) -> list[Request]:
    """One request of each kind, with drafts of different lengths."""
    chances = torch.Generator().manual_seed(seed)
    made = [
        (request("greedy", temperature=0.0, logprobs=1), guesses(seed, 5)),
        (request("plain", seed=1), lambda owner: None),
        (request("guessed", seed=2, logprobs=0), guesses(seed + 1, 5)),
        (request("drawn", seed=3, top_p=0.8), drawn(chances, 3)),
        (request("long", seed=4, temperature=0.7, logprobs=3), drawn(chances, 5)),
        (request("guessed again", seed=5, **WISHES["penalties"]), guesses(seed + 2, 5)),
    ]
    for owner, propose in made:
        owner.propose(propose(owner))
    return [owner for owner, _ in made]


@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize("seed", range(4))
def test_in_whatever_company_a_request_gets_the_same_tokens(rule, seed):
    alone = [step(Sampler(EOS, rule), [r])[0] for r in everyone(seed)]
    together = everyone(seed)
    order = random.Random(seed).sample(range(len(together)), len(together))
    choices = step(Sampler(EOS, rule), [together[i] for i in order])
    for i, choice in zip(order, choices):
        assert choice.tokens == alone[i].tokens
        assert choice.error is None
        entries = choice.logprobs or []
        assert len(entries) == (0 if together[i].params.logprobs is None else len(choice.tokens))
        for entry, token, row in zip(entries, choice.tokens, rows_of(together[i], len(together[i].drafts))):
            assert entry.token == token
            assert entry.logprob == pytest.approx(float(row.log_softmax(-1)[token]), abs=1e-5)
            assert len(entry.top) == together[i].params.logprobs


def test_a_seed_gives_the_same_answer_again():
    def answer():
        propose = drawn(torch.Generator().manual_seed(1), 4)
        return generate(request(seed=11), Sampler(EOS), propose)

    assert answer() == answer()


def test_only_the_drafts_that_were_run_are_judged():
    owner = request(temperature=0.0)
    best = guesses(0, 0)
    history = owner.tokens.tolist()
    for _ in range(5):
        history.append(int(next_logits(history).argmax()))
    owner.propose(Draft(history[2:]))
    assert best(owner) is None
    for count in range(6):
        (choice,) = step(Sampler(EOS), [owner], [count])
        assert choice.tokens[:count] == owner.drafts[:count]
        assert len(choice.tokens) == count + 1


def test_drafts_of_another_proposal_are_not_judged_by_its_distribution():
    owner = request(seed=1)
    owner.propose(drawn(torch.Generator().manual_seed(1), 3)(owner))
    owner.drafts = [(token + 1) % V for token in owner.drafts]
    with pytest.raises(AssertionError, match="another proposal"):
        step(Sampler(EOS), [owner])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("broken", range(6))
def test_one_row_that_is_not_finite_is_its_requests_error_and_nobody_elses(broken, place, bad):
    sound = [c.tokens for c in step(Sampler(EOS), everyone(2))]
    requests = everyone(2)
    counts = [len(r.drafts) for r in requests]
    rows = [rows_of(r, n) for r, n in zip(requests, counts)]
    rows[broken][min(place, counts[broken]), 7] = bad
    choices = Sampler(EOS).sample(torch.cat(rows), requests, counts)
    for i, choice in enumerate(choices):
        if i == broken:
            assert choice == ([], None, "the model's logits are not finite")
        else:
            assert (choice.tokens, choice.error) == (sound[i], None)


SHAPES = {
    "plain": {},
    "shaped": {"temperature": 1.3, "top_k": 4, "top_p": 0.9, "min_p": 0.05},
    "penalties": {"top_k": 5, **WISHES["penalties"]},
}
LENGTH, DRAWS = 3, 2000


def shaped_model(owner: Request):
    """What plain sampling draws from after each prefix."""

    def after(prefix):
        later = Request("later", owner.prompt, owner.params)
        later.tokens.extend(prefix)
        return distribution(adjust(next_logits(later.tokens)[None], [later], EOS), [later])[0]

    return after


def sequences(sampler: Sampler, propose, **params) -> list[list[int]]:
    """DRAWS answers of LENGTH tokens, all requests in the same steps."""
    owners = [request(f"r{i}", seed=i, **params) for i in range(DRAWS)]
    while waiting := [r for r in owners if r.output_tokens < LENGTH]:
        for owner in waiting:
            owner.propose(propose(owner))
        for owner, choice in zip(waiting, step(sampler, waiting)):
            owner.tokens.extend(choice.tokens)
    return [owner.output[:LENGTH] for owner in owners]


KINDS = [("standard", True), ("block", True), ("block", False), ("standard", False)]


def doubt(rule: str, was_drawn: bool, shape: str) -> float:
    propose = drawn(torch.Generator().manual_seed(1), 2) if was_drawn else guesses(1, 3)
    expected = joint(shaped_model(request(**SHAPES[shape])), LENGTH)
    return fit(sequences(Sampler(EOS, rule), propose, **SHAPES[shape]), expected)


SLOW = [pytest.param(shape, marks=pytest.mark.slow) for shape in sorted(SHAPES) if shape != "shaped"]


@pytest.mark.parametrize("shape", ["shaped", *SLOW])
@pytest.mark.parametrize(("rule", "was_drawn"), KINDS)
def test_answers_come_as_often_as_without_drafts(rule, was_drawn, shape):
    assert doubt(rule, was_drawn, shape) > 1e-3


@pytest.mark.parametrize(
    ("rule", "was_drawn"), [KINDS[1], *(pytest.param(*KINDS[i], marks=pytest.mark.slow) for i in (0, 2))]
)
def test_the_count_of_answers_finds_a_biased_verifier(rule, was_drawn, monkeypatch):
    forget_the_residual(monkeypatch)
    assert doubt(rule, was_drawn, "shaped") < 1e-6


def test_numbers_that_were_given_back_come_again():
    chance, plain = Chance(3), Chance(3)
    expected = plain.take(8)
    assert chance.take(5) == expected[:5]
    chance.give_back(expected[2:5])
    assert chance.take(2) == expected[2:4]
    assert chance.take(4) == expected[4:]


def accepted(tokens, **params):
    """What a request keeps, and its end, when all drafts of a step are accepted: (tokens, finish)."""
    owner = request(temperature=0.0, **params)
    owner.propose(Draft(tokens[:-1]))
    rows = torch.full((len(tokens), V), -5.0)
    rows[range(len(tokens)), tokens] = 5.0
    (choice,) = Sampler(EOS).sample(rows, [owner], [len(tokens) - 1])
    kept, finish = cut(owner, choice.tokens, EOS, 1000)
    owner.tokens.extend(kept)
    return owner.output, finish


@pytest.mark.parametrize(
    ("tokens", "params", "kept", "finish"),
    [
        ([5, 6, 3, 7, 8, 9], {"max_tokens": 5, "stop_token_ids": (3,)}, [5, 6, 3], "stop"),
        ([5, 6, 7, 8, 3, 9], {"max_tokens": 3, "stop_token_ids": (3,)}, [5, 6, 7], "length"),
        ([5, 6, 3, 8, 9, 9], {"max_tokens": 3, "stop_token_ids": (3,)}, [5, 6, 3], "stop"),
        ([0, 6, 7, 8], {"max_tokens": 5}, [0], "stop"),
        ([0, 6, 7, 8], {"ignore_eos": True}, [0, 6, 7, 8], None),
        ([4, 5, 6, 7, 8, 9, 10, 11], {"max_tokens": 1}, [4], "length"),
        ([5, 6, 7, 8, 9, 3], {"stop_token_ids": (3,)}, [5, 6, 7, 8, 9, 3], "stop"),
    ],
)
def test_of_an_accepted_block_the_earlier_of_stop_and_limit_wins(tokens, params, kept, finish):
    assert accepted(tokens, **params) == (kept, finish)
    one_by_one = request(temperature=0.0, **params)
    for token in tokens:
        taken, end = cut(one_by_one, [token], EOS, 1000)
        one_by_one.tokens.extend(taken)
        if end:
            break
    assert (one_by_one.output, end) == (kept, finish)


def test_a_stop_that_comes_too_early_is_not_accepted_even_when_drafted():
    owner = request(temperature=0.0, min_tokens=3)
    owner.propose(Draft([5, 0, 6, 0]))
    rows = torch.zeros(5, V)
    rows[range(5), [5, 0, 6, 0, 7]] = 9.0
    rows[1, 4] = 8.0
    (choice,) = Sampler(EOS).sample(rows, [owner], [4])
    assert choice.tokens == [5, 4]
