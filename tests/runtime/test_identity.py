"""Greedy identity: whatever shares the step and however a prompt is cut, a request gets the tokens it gets
alone.

Exact in float64 without Inductor. The full sizes are slow; the fast lane runs fewer and shorter prompts.
"""

import pytest
import torch
from identity import LENGTHS, PreemptAt, ask, prompts, serve, serve_alone, start
from k3compile.runtime.checkpoint import make_checkpoint
from k3compile.runtime.weights import load_model

SHORT = (1, 2, 33, 64, 65, 130)
WAYS = {
    "whole prompts": {},
    "budget 64": {"max_num_batched_tokens": 64},
    "budget 5": {"max_num_batched_tokens": 5},
    "four slots": {"max_num_batched_tokens": 200, "max_num_seqs": 4},
    "few pages": {"few_pages": True, "max_num_batched_tokens": 256},
    "cached on blocks of 64": {"max_num_batched_tokens": 200, "prefix_cache": True, "block_size": 64},
    "few pages, cached": {"few_pages": True, "prefix_cache": True, "block_size": 64, "num_checkpoints": 3},
}
CACHED = {
    "blocks of 64": {"block_size": 64},
    "blocks of 64, hits of 16": {"block_size": 64, "prefix_match_unit": 16, "page_size": 16},
    "ends of prompts only, budget 100": {"retention_interval": 0, "max_num_batched_tokens": 100},
    "two kept states": {"block_size": 64, "num_checkpoints": 2, "max_num_seqs": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The tiny preset in float64."""
    return load_model(make_checkpoint(tmp_path_factory.mktemp("tiny"), "tiny", seed=0), torch.float64)


@pytest.fixture(scope="module")
def short(model):
    asked = prompts(SHORT)
    return asked, serve_alone(model, asked, 40)


@pytest.fixture(scope="module")
def full(model):
    asked = prompts(LENGTHS)
    return asked, serve_alone(model, asked, 48)


def assert_same(answers, alone):
    assert [a.tokens for a in answers] == [a.tokens for a in alone]
    for got, expected in zip(answers, alone):
        assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-8)


@pytest.mark.parametrize("way", WAYS)
def test_short_prompts_get_their_tokens_in_company(model, short, way):
    asked, alone = short
    assert_same(serve(model, asked, 40, **WAYS[way]), alone)


def test_requests_thrown_out_at_decode_token_37_go_on_as_before(model, short):
    asked, alone = short
    hook = PreemptAt([1, 3, 5], token=37)
    assert_same(serve(model, asked, 40, between_steps=hook, max_num_seqs=4), alone)
    assert not hook.left


def test_a_request_thrown_out_in_the_middle_of_its_prompt_starts_again(model, short):
    asked, alone = short

    class InThePrompt(PreemptAt):
        def __call__(self, engine):
            for request in list(engine.scheduler.running):
                if request.id in self.left and 0 < request.seen < request.prompt_tokens:
                    self.left.discard(request.id)
                    engine.scheduler.preempt(request)

    hook = InThePrompt([3, 5], 0)
    assert_same(serve(model, asked, 40, between_steps=hook, max_num_batched_tokens=40), alone)
    assert not hook.left


@pytest.mark.parametrize("way", CACHED)
def test_conversations_that_go_on_from_the_cache_are_those_without_it(model, way):
    """Two prompts with one beginning, around a boundary, asked, asked again and continued."""
    common = prompts([63], seed=1)[0]
    first = [[*common, *more] for more in prompts([1, 2, 70], seed=2)]
    engine = start(model, 400, prefix_cache=True, **CACHED[way])
    answers = ask(engine, first, 12)
    assert_same(answers, serve_alone(model, first, 12))
    before = engine.stats().prefix_hit_tokens
    assert_same(ask(engine, first, 12), answers)
    turn = [[*p, *a.tokens, *more] for p, a, more in zip(first, answers, prompts([9, 50, 3], seed=3))]
    assert_same(ask(engine, turn, 12), serve_alone(model, turn, 12))
    assert engine.stats().prefix_hit_tokens > before


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
