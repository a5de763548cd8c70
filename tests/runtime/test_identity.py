"""Greedy identity: whatever shares the step and however a prompt is cut, a request gets the tokens it gets
alone.

Exact in float64 without Inductor. The full sizes are slow; the fast lane runs fewer and shorter prompts over
fewer and narrower layers of the same kinds.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from identity import LENGTHS, PreemptAt, ask, prompts, serve, serve_alone, start
from k3compile.runtime.checkpoint import make_checkpoint
from k3compile.runtime.model import Model
from k3compile.runtime.weights import load_model
from lanes import thinned
from oracle_drafter import OracleDrafter
from small_models import dealt, small_model

SHORT = (1, 2, 33, 64, 65, 130)
FIVE_LAYERS = dealt(2)  # of all kinds
WAYS = {
    "whole prompts": {},
    "budget 64": {"max_num_batched_tokens": 64},
    "budget 5": {"max_num_batched_tokens": 5},
    "four slots": {"max_num_batched_tokens": 200, "max_num_seqs": 4},
    "few pages": {"few_pages": True, "max_num_batched_tokens": 256},
    "cached on blocks of 64": {"max_num_batched_tokens": 200, "prefix_cache": True, "block_size": 64},
    "few pages, cached": {"few_pages": True, "prefix_cache": True, "block_size": 64, "num_checkpoints": 3},
}
COSTLY = ("whole prompts", "budget 5", "few pages", "four slots")
CACHED = {
    "blocks of 64": {"block_size": 64},
    "blocks of 64, hits of 16": {"block_size": 64, "prefix_match_unit": 16, "page_size": 16},
    "ends of prompts only, budget 100": {"retention_interval": 0, "max_num_batched_tokens": 100},
    "few kept states": {"block_size": 64, "num_checkpoints": 4, "max_num_seqs": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "tiny", seed=0)


@pytest.fixture(scope="module")
def model(folder):
    """The tiny preset in float64."""
    return load_model(folder, torch.float64)


class Small(NamedTuple):
    """A model for short prompts, and how many ids of text it knows."""

    model: Model
    vocab: int
    without_replay: Callable[[], Model]


@pytest.fixture(scope="module", params=["five layers", pytest.param("tiny", marks=pytest.mark.slow)])
def small(request):
    if request.param == "five layers":
        return Small(small_model(FIVE_LAYERS), 90, lambda: small_model(FIVE_LAYERS, state_replay=False))
    folder = request.getfixturevalue("folder")
    model = request.getfixturevalue("model")
    return Small(model, 1024, lambda: load_model(folder, torch.float64, state_replay=False))


@pytest.fixture(scope="module")
def short(small):
    asked = prompts(SHORT, small.vocab)
    return asked, serve_alone(small.model, asked, 40)


@pytest.fixture(scope="module")
def full(model):
    asked = prompts(LENGTHS)
    return asked, serve_alone(model, asked, 48)


def assert_same(answers, alone):
    assert [a.tokens for a in answers] == [a.tokens for a in alone]
    for got, expected in zip(answers, alone):
        assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-8)


@pytest.mark.parametrize("way", [pytest.param(w, marks=pytest.mark.slow) if w in COSTLY else w for w in WAYS])
def test_short_prompts_get_their_tokens_in_company(small, short, way):
    asked, alone = short
    assert_same(serve(small.model, asked, 40, **WAYS[way]), alone)


def test_requests_thrown_out_at_decode_token_37_go_on_as_before(small, short):
    asked, alone = short
    hook = PreemptAt([1, 3, 5], token=37)
    assert_same(serve(small.model, asked, 40, between_steps=hook, max_num_seqs=4), alone)
    assert not hook.left


def test_a_request_thrown_out_in_the_middle_of_its_prompt_starts_again(small, short):
    asked, alone = short

    class InThePrompt(PreemptAt):
        def __call__(self, engine):
            for request in list(engine.scheduler.running):
                if request.id in self.left and 0 < request.seen < request.prompt_tokens:
                    self.left.discard(request.id)
                    engine.scheduler.preempt(request)

    hook = InThePrompt([3, 5], 0)
    assert_same(serve(small.model, asked, 40, between_steps=hook, max_num_batched_tokens=40), alone)
    assert not hook.left


@pytest.fixture(scope="module")
def conversation(small):
    """Two turns of three conversations with one beginning, around a boundary, as each is served alone."""
    common = prompts([63], small.vocab, seed=1)[0]
    first = [[*common, *more] for more in prompts([1, 2, 70], small.vocab, seed=2)]
    answers = serve_alone(small.model, first, 8)
    more = prompts([9, 50, 3], small.vocab, seed=3)
    second = [[*p, *a.tokens, *new] for p, a, new in zip(first, answers, more)]
    return (first, answers), (second, serve_alone(small.model, second, 8))


@pytest.mark.parametrize("way", thinned(CACHED, 2))
def test_conversations_that_go_on_from_the_cache_are_those_without_it(small, conversation, way):
    engine = start(small.model, 400, prefix_cache=True, **CACHED[way])
    first, second = conversation
    for asked, alone in (first, first, second):
        assert_same(ask(engine, asked, 8), alone)
    stats = engine.stats()
    assert stats.prefix_hit_tokens > 0
    assert stats.rows == sum(len(p) + 7 for asked, _ in (first, first, second) for p in asked) - (
        stats.prefix_hit_tokens
    )


@pytest.mark.parametrize("cached", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("replay", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_short_prompts_get_their_tokens_when_drafts_are_verified(small, short, replay, cached):
    """Of four drafts none to all are right; states are kept inside the rows that are verified."""
    asked, alone = short
    model = small.model if replay else small.without_replay()
    more = {"prefix_cache": True, "block_size": 16, "page_size": 16} if cached else {}
    engine = start(model, 200, num_drafts=4, state_replay=replay, max_num_seqs=4, **more)
    rng = random.Random(0)
    known = {tuple(p): [*a.tokens, 0, 0, 0, 0] for p, a in zip(asked, alone)}
    engine.speculation.drafter = OracleDrafter(
        lambda prompt: known[tuple(prompt)], small.vocab, 4, lambda request: rng.randrange(5)
    )
    assert_same(ask(engine, asked, 40), alone)
    assert engine.stats().drafts_accepted[3] > 0
    if cached:
        longer = [[*p, *a.tokens[:37]] for p, a in zip(asked, alone)]
        engine.speculation.drafter = None
        for got, expected in zip(ask(engine, longer, 3), alone):
            assert got.tokens == expected.tokens[37:]
        assert engine.stats().prefix_hit_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_sixteen_prompts_get_their_tokens_in_company(model, full, way):
    asked, alone = full
    assert_same(serve(model, asked, 48, **WAYS[way]), alone)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["whole prompts", "budget 64", "budget 5"])
def test_sixteen_prompts_survive_a_preemption_at_decode_token_37(model, full, way):
    asked, alone = full
    hook = PreemptAt([0, 7, 15], token=37)
    assert_same(serve(model, asked, 48, between_steps=hook, **WAYS[way]), alone)
    assert not hook.left
