"""Drafts that were not drawn, under the standard rule: a seed's answers are those without drafts, to the last
logprob, whatever is asked of the sampler and whatever happens to the request.
"""

import random

import pytest
from k3compile.runtime.request import Request, SamplingParams
from k3compile.runtime.speculate.draft import Draft

EOS = (5, 6)
SHARED = 24  # tokens that prompts may have in common


class Guesser:
    """Proposes what comes without drafts, often spoilt: by a stop id, a wrong id, no id, or too many."""

    lookahead, taps = 0, ()

    def __init__(self, toy, answers, most, rng):
        self.answers, self.most, self.rng, self.vocab = answers, most, rng, toy.VOCAB

    def observe(self, step, taps): ...
    def forget(self, request): ...

    def propose(self, requests, holdings):
        return [self.draft(request) for request in requests]

    def draft(self, request):
        rng, done = self.rng, request.output_tokens
        tokens = [
            *self.answers[request.id.strip("'")][done:],
            *(rng.randrange(self.vocab) for _ in range(18)),
        ]
        tokens = tokens[: rng.choice([0, 1, self.most, self.most, self.most + 2])]
        if tokens and rng.random() < 0.5:
            tokens[rng.randrange(len(tokens))] = rng.choice([*EOS, -1, rng.randrange(self.vocab)])
        return Draft(tokens) if tokens else None


def wishes(toy, rng) -> SamplingParams:
    """A request's parameters, extremes among them."""

    def some(count):
        return [rng.randrange(toy.VOCAB) for _ in range(count)]

    asked = {
        "max_tokens": rng.choice([1, 2, 3, 9, 30, None]),
        "temperature": rng.choice([0.0, 1e-4, 0.3, 1.0, 100.0]),
        "top_p": rng.choice([1.0, 0.9, 1e-9]),
        "min_p": rng.choice([0.0, 0.0, 0.2, 1.0]),
        "top_k": rng.choice([0, 0, 1, 5]),
        "logprobs": rng.choice([None, 0, 3]),
        "ignore_eos": rng.random() < 0.3,
        "seed": rng.randrange(1000),
    }
    if rng.random() < 0.4:
        asked["repetition_penalty"] = rng.choice([1.0, 1.0, 0.01, 1.3, 100.0])
        asked["frequency_penalty"] = rng.choice([-2.0, 0.7])
        asked["presence_penalty"] = rng.choice([-0.5, 2.0])
    if rng.random() < 0.4:
        asked["logit_bias"] = {token: rng.choice([-100.0, 5.0, 100.0]) for token in some(4)}
    if rng.random() < 0.4:
        asked["stop_token_ids"] = tuple(some(6))
    if rng.random() < 0.4:
        asked["min_tokens"] = min(rng.choice([2, 5, 12]), asked["max_tokens"] or 12)
    return SamplingParams(**asked)


def serve(toy, engine, requests, rng=None):
    """(tokens, finish, error, logprobs) of each; with ``rng`` they come one after another and are thrown out
    now and then.
    """
    heard, todo = {r.id: toy.Listener() for r in requests}, list(requests)
    while True:
        while todo and (rng is None or rng.random() < 0.6):
            engine.submit(todo[0], heard[todo.pop(0).id])
        went = engine.step()
        engine.cache.check()
        if rng and engine.scheduler.running and rng.random() < 0.08:
            engine.scheduler.preempt(rng.choice(engine.scheduler.running))
        if not went and not todo:
            break
    toy.assert_nothing_left(engine)
    return {
        name.strip("'"): (h.tokens, h.finish, h.error, [e for u in h.updates for e in u.logprobs or []])
        for name, h in heard.items()
    }


def one_case(toy, seed):
    rng = random.Random(seed)
    shared = [rng.randrange(toy.VOCAB) for _ in range(SHARED)]
    lengths = [(rng.choice([0, 8, SHARED]), rng.choice([1, 7, 8, 9, 30])) for _ in range(rng.randint(1, 6))]
    made = [
        (shared[:begin] + [rng.randrange(toy.VOCAB) for _ in range(rest)], wishes(toy, rng))
        for begin, rest in lengths
    ]

    def requests(mark=""):
        return [Request(f"{i}{mark}", *one) for i, one in enumerate(made)]

    most, longest = rng.choice([1, 2, 3, 7, 16]), rng.choice([60, 72])
    plain = toy.engine(toy.Model(EOS), num_pages=200, max_num_batched_tokens=64, max_model_len=longest)
    expected = serve(toy, plain, requests())
    config = {
        "num_drafts": most,
        "verification": "standard",
        "state_replay": rng.random() < 0.5,
        "max_model_len": longest,
        "num_pages": rng.choice([30, 40, 200]),
        "max_num_seqs": rng.choice([1, 2, 4]),
        "max_num_batched_tokens": rng.choice([most + 9, 64]),
    }
    if cached := rng.random() < 0.7:
        config |= {"prefix_cache": True, "block_size": rng.choice([4, 8, 16])}
        config |= {"prefix_match_unit": 4, "num_checkpoints": rng.choice([1, 2, 8])}
    guesser = Guesser(toy, {name: one[0] for name, one in expected.items()}, most, rng)
    engine = toy.engine(toy.Model(EOS), guesser, exports=rng.random() < 0.4, **config)
    assert serve(toy, engine, requests(), rng) == expected
    if cached:
        assert serve(toy, engine, requests("'"), rng) == expected
    assert engine.speculation.error is None
    return sum(engine.stats().drafts_accepted)


def test_sampled_answers_are_those_without_drafts(toy):
    assert sum(one_case(toy, seed) for seed in range(10)) > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 1100, 100))
def test_sampled_answers_are_those_without_drafts_in_much_traffic(toy, seed):
    for case in range(seed, seed + 10):
        one_case(toy, case)
