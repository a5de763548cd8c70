"""Twelve requests for the trained tiny model, what each gets alone, and the loop that serves them together.

    page 16   unit 32   block 64   step 96 rows   4 at once
    request 0 .. 4    a long list, a copy, a sum, a call, a list: what the model and its draft were trained on
    request 5         noise, longer than two steps
    request 6, 7      the first one resent, and its next turn
    request 8 .. 10   half of the first one and more, a stranger with its prompt, one token
    request 11        noise that is thrown out and comes back, or is aborted

Plain data: it travels to every rank. ``known`` is made by one process without ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from features_server import due
from features_traffic import Ask
from k3compile.runtime.engine import Engine, Update
from k3compile.runtime.engine_config import EngineConfig
from k3compile.runtime.make_engine import make_engine
from k3compile.runtime.model import Model
from k3compile.runtime.request import Request
from k3compile.runtime.sampling_params import SamplingParams
from k3compile.runtime.tokenizer import Tokenizer
from tie_aware import Reference, RouterLog, stacked

from k3compile.bench.recall_tasks import generate
from k3compile.cli.loading import SHIPPED

SIZES = {
    "max_num_batched_tokens": 96,
    "max_num_seqs": 4,
    "page_size": 16,
    "num_pages": 64,
    "max_model_len": 512,
    "poison": True,
}
CACHE = {"prefix_cache": True, "prefix_match_unit": 32, "block_size": 64, "num_checkpoints": 8}
STRANGER = 9  # whose prompt is the first one's, under another salt
TEXT = 760  # ids from here on may be control tokens


class Answer(NamedTuple):
    """What a request got: its tokens, and of each the two best ids with their log-probabilities."""

    tokens: list[int]
    best: list[tuple[tuple[int, float], ...]]
    finish: str | None = None


class Known(NamedTuple):
    """A request as it must come out."""

    ask: Ask
    prompt: list[int]
    answer: Answer
    reference: Reference


def traffic(count: int = 12) -> list[Ask]:
    """The first ``count`` of the twelve requests."""
    tokenizer, rng = Tokenizer(SHIPPED), random.Random(3)

    def problem(task: str, seed: int) -> list[int]:
        return generate(task, 1, seed, "plain" if task != "tool" else None)[0].prompt_ids(tokenizer)

    def noise(length: int) -> list[int]:
        return [rng.randrange(TEXT) for _ in range(length)]

    first = problem("long", 5)
    asks = [
        Ask(first, 5),
        Ask(problem("copy", 6), 9),
        Ask(problem("sum", 7), 4, arrival=1),
        Ask(problem("tool", 8), 10, arrival=1),
        Ask(problem("recall", 9), 5, arrival=2),
        Ask(noise(230), 3, arrival=3),
        Ask(first, 5, arrival=1, after=(0,)),
        Ask(noise(20), 4, after=(0,), turn_of=0),
        Ask(first[:100] + noise(12), 4, after=(0,)),
        Ask(first, 1, after=(0,), salt="a stranger"),
        Ask(noise(1), 6, arrival=4),
        Ask(noise(70), 8, arrival=5),
    ]
    return asks[:count]


def request_of(index: int, prompt: list[int], ask: Ask) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=ask.max_tokens, ignore_eos=True, logprobs=2)
    return Request(str(index), prompt, params, arrival=float(index), cache_salt=ask.salt)


def alone(model: Model, asks: Sequence[Ask]) -> list[Known]:
    """Each request by itself, in one pass, as the model is written."""
    config = EngineConfig(max_num_batched_tokens=1024, max_num_seqs=1, max_model_len=512, poison=True)
    known: list[Known] = []
    for ask in asks:
        before = [] if ask.turn_of is None else known[ask.turn_of].prompt + known[ask.turn_of].answer.tokens
        prompt = before + ask.tokens
        with RouterLog().watching() as log:
            engine = make_engine(model, config)
            log.attach(engine)
            answer = serve(engine, [ask], [prompt])[0]
        experts, gaps = (stacked(column["0"]) for column in (log.experts, log.router_gaps))
        reference = Reference(len(prompt), answer.tokens, answer.best, experts, gaps)
        known.append(Known(ask, prompt, answer, reference))
    return known


Hook = Callable[[Engine, int], None]  # called after each step with its number


def serve(
    engine: Engine, asks: Sequence[Ask], prompts: Sequence[list[int]], hook: Hook | None = None
) -> list[Answer]:
    """Serve all and walk the books after every step; nothing is left in use."""
    answers = [Answer([], []) for _ in asks]
    waiting, ended, step = set(range(len(asks))), {}, 0

    def listen(update: Update) -> None:
        assert update.error is None, update.error
        index = int(update.request_id)
        answers[index].tokens.extend(update.tokens)
        answers[index].best.extend(entry.top for entry in update.logprobs or [])
        if update.finish is not None:
            answers[index] = answers[index]._replace(finish=update.finish)

    alone = len(asks) == 1
    while waiting or len(ended) < len(asks):
        assert step < 400, f"after {step} steps these have not ended: {set(range(len(asks))) - set(ended)}"
        for index in sorted(waiting):
            if alone or due(asks[index], ended, step):
                waiting.discard(index)
                engine.submit(request_of(index, prompts[index], asks[index]), listen)
        engine.step()
        if hook is not None:
            hook(engine, step)
        engine.cache.check()
        step += 1
        for index, answer in enumerate(answers):
            if answer.finish is not None:
                ended.setdefault(index, step)
    assert engine.speculation.error is None
    stats = engine.stats()
    assert stats.running == stats.waiting == stats.pages_used == stats.slots_used == 0
    return answers


class Disturb:
    """A hook that throws request 11 out once it has said something, or aborts it."""

    def __init__(self, kind: str) -> None:
        assert kind in ("preempt", "abort")
        self.kind, self.hit = kind, False

    def __call__(self, engine: Engine, step: int) -> None:
        for request in list(engine.scheduler.running):
            if request.id == "11" and request.output_tokens >= 2 and not self.hit:
                self.hit = True
                engine.scheduler.preempt(request) if self.kind == "preempt" else engine.abort("11")


def wrong(known: Sequence[Known], answers: Sequence[Answer], within: float = 1e-9) -> list[str]:
    """Where answers are not those of requests served alone: other tokens, or another log-probability of one
    of the two best. An aborted request may have fewer.
    """
    found = []
    for index, (one, got) in enumerate(zip(known, answers, strict=True)):
        cut = len(got.tokens) if got.finish == "abort" else len(one.answer.tokens)
        if got.tokens != one.answer.tokens[:cut]:
            found.append(f"request {index} got {got.tokens}, alone it gets {one.answer.tokens}")
            continue
        for place, (mine, theirs) in enumerate(zip(got.best, one.answer.best)):
            off = max(abs(a[1] - b[1]) for a, b in zip(mine, theirs))
            if [a[0] for a in mine] != [b[0] for b in theirs] or not off <= within:
                found.append(f"request {index}, token {place}: {mine} and alone {theirs}")
    return found


def filled(pools: Sequence[Sequence[torch.Tensor]]) -> int:
    """Values in slots and pages that are not NaN, the null ones left out: what nobody gave back."""
    return sum(int(torch.isfinite(tensor[1:]).sum()) for layer in pools for tensor in layer)
