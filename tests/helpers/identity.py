"""Sixteen greedy requests served in different ways, and how their answers are compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from k3compile.runtime.engine import Engine
from k3compile.runtime.engine_config import EngineConfig
from k3compile.runtime.make_engine import make_engine
from k3compile.runtime.request import Request, SamplingParams

LENGTHS = (1, 2, 3, 5, 17, 63, 64, 65, 100, 127, 129, 200, 256, 333, 511, 700)


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[float]  # the model's, of each token
    best: list[tuple[tuple[int, float], ...]]  # the two best ids at each token


def prompts(lengths: Sequence[int] = LENGTHS, vocab: int = 1024, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(n)] for n in lengths]


def serve(
    model,
    asked: Sequence[list[int]],
    max_tokens: int,
    compile_forward: Callable | None = None,
    between_steps: Callable[[Engine], None] = lambda engine: None,
    router_log=None,
    **config,
) -> list[Answer]:
    """Greedy answers of ``max_tokens`` tokens to all prompts at once; everything freed holds NaN.

    router_log: a tie_aware.RouterLog that watches.
    """
    longest = max(map(len, asked)) + max_tokens
    engine = start(model, longest, compile_forward, **config)
    if router_log is not None:
        router_log.attach(engine)
    answers = ask(engine, asked, max_tokens, between_steps)
    assert engine.scheduler.preemptions or not config.get("few_pages")
    return answers


def start(model, longest: int, compile_forward: Callable | None = None, **config) -> Engine:
    """An engine for requests of ``longest`` tokens."""
    settings = {"max_model_len": longest, "page_size": 64, "poison": True, **config}
    if settings.pop("few_pages", False):  # enough for the longest request and two pages more
        settings |= {"page_size": 16, "num_pages": -(-longest // 16) + 3}
    return make_engine(model, EngineConfig(**settings), compile_forward)


def ask(
    engine: Engine,
    asked: Sequence[list[int]],
    max_tokens: int,
    between_steps: Callable[[Engine], None] = lambda engine: None,
) -> list[Answer]:
    """Greedy answers to all prompts at once; the books are right afterwards."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=2)
    answers = [Answer([], [], []) for _ in asked]
    errors = []

    def listen(update):
        answer = answers[int(update.request_id)]
        answer.tokens.extend(update.tokens)
        answer.logprobs.extend(entry.logprob for entry in update.logprobs or [])
        answer.best.extend(entry.top for entry in update.logprobs or [])
        if update.error:
            errors.append(update.error)

    for i, prompt in enumerate(asked):
        engine.submit(Request(str(i), prompt, params), listen)
    while engine.step():
        between_steps(engine)
    assert not errors, errors[0]
    if engine.tiers is not None:
        assert engine.tiers.drain(60)  # what is being stored cannot go
    engine.cache.check()
    assert (engine.cache.available, engine.cache.slots.used) == (engine.cache.pages.size - 1, 0)
    return answers


def serve_alone(model, asked: Sequence[list[int]], max_tokens: int, **config) -> list[Answer]:
    """Each prompt by itself, in one prefill pass: what every other way of serving must equal."""
    return [serve(model, [prompt], max_tokens, max_num_seqs=1, **config)[0] for prompt in asked]


class PreemptAt:
    """Throws requests out when they have generated so many tokens, once each."""

    def __init__(self, requests: Sequence[int], token: int) -> None:
        self.left = {str(i) for i in requests}
        self.token = token

    def __call__(self, engine: Engine) -> None:
        for request in list(engine.scheduler.running):
            if request.id in self.left and request.output_tokens == self.token:
                self.left.discard(request.id)
                engine.scheduler.preempt(request)
