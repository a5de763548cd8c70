"""Through the engine: whatever is accepted, with records or with a state a row, requests get the tokens that
they get without drafts, and so does the next turn, from the states that were kept while they decoded.
"""

import dataclasses
import random

import pytest
import torch
from k3compile.runtime.engine_config import EngineConfig
from k3compile.runtime.make_engine import make_engine
from k3compile.runtime.request import Request, SamplingParams
from k3compile.runtime.speculate.draft import Draft
from lanes import slow
from small_models import SMALL, small_model

CONFIG = dataclasses.replace(SMALL, num_hidden_layers=5, kda_layers=(0, 1, 2, 4), attn_res_block_size=2)
LENGTHS, TOKENS = (5, 70, 17, 1), 28
BOTH = pytest.mark.parametrize("replay", [True, False], ids=["replay", "states"])
CACHED = {"prefix_cache": True, "block_size": 16, "prefix_match_unit": 8}


class Foresight:
    """Drafts the true continuation, and from a random place on something else: any number is accepted."""

    lookahead, taps = 0, ()

    def __init__(self, known: dict[str, list[int]], most: int) -> None:
        self.known, self.most, self.chance = known, most, random.Random(0)
        self.right: list[int] = []  # of each draft, how many of its first tokens are right

    def observe(self, step, taps) -> None:
        pass

    def propose(self, requests, holdings):
        return [self.draft(request) for request in requests]

    def draft(self, request):
        rest = self.known[request.id][request.output_tokens :][: self.chance.choice((0, 1, self.most))]
        if not rest:
            return None
        right = self.chance.choice((0, len(rest), self.chance.randint(0, len(rest))))
        self.right.append(right)
        return Draft([*rest[:right], *((token + 1) % 90 for token in rest[right:])])

    def forget(self, request) -> None:
        pass


def prompts(seed=0):
    chance = random.Random(seed)
    return {f"r{i}": [chance.randrange(90) for _ in range(n)] for i, n in enumerate(LENGTHS)}


def serve(
    engine, asked: dict[str, list[int]], tokens: int = TOKENS
) -> tuple[dict[str, list[int]], dict[str, int]]:
    """What each request got, and how many tokens of its prompt were not run again."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    requests = [Request(name, prompt, params) for name, prompt in asked.items()]
    got, cached = {r.id: [] for r in requests}, {}

    def hear(update):
        assert update.error is None, update.error
        got[update.request_id] += update.tokens

    for request in requests:
        engine.submit(request, hear)
    while engine.step():
        engine.cache.check()
        cached |= {r.id: r.cached_tokens for r in requests}
    return got, cached


def engine_of(replay=True, drafter=None, drafts=0, model=None, **more):
    model = model or small_model(CONFIG, state_replay=replay)
    config = {
        "page_size": 8,
        "num_pages": 120,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 96,
        "poison": True,
    }
    config = EngineConfig(**config, num_drafts=drafts, state_replay=replay, **more)
    return make_engine(model, config, drafter=drafter)


@pytest.fixture(scope="module")
def alone():
    """Without drafts and one at a time: two turns of each conversation."""
    first, second = {}, {}
    for name, prompt in prompts().items():
        first |= serve(engine_of(), {name: prompt})[0]
        second |= serve(engine_of(), {name: next_turn(prompt, first[name])}, 9)[0]
    return first, second


def next_turn(prompt, output):
    return [*prompt, *output, 17, 4, 42]


@BOTH
@pytest.mark.parametrize("cached", [slow(False), True], ids=["", "prefix cache"])
@pytest.mark.parametrize("drafts", [*(pytest.param(k, marks=pytest.mark.slow) for k in (1, 3)), 8])
def test_tokens_are_those_without_drafts_in_both_turns(alone, drafts, cached, replay):
    first, second = alone
    drafter = Foresight({name: first[name] for name in first}, drafts)
    engine = engine_of(replay, drafter, drafts, **(CACHED if cached else {}))
    got, _ = serve(engine, prompts())
    assert got == first
    assert {0, drafts} <= set(drafter.right), "from none of a draft to all of it was right"
    drafter.known = second
    asked = {name: next_turn(prompt, first[name]) for name, prompt in prompts().items()}
    got, hits = serve(engine, asked, 9)
    assert got == second
    if cached:  # generated tokens are hit too: the last multiple of 8 that was reached while decoding
        assert hits == {name: (len(tokens) - 4) // 8 * 8 for name, tokens in asked.items()}


@BOTH
def test_a_request_that_ends_inside_accepted_drafts_keeps_what_it_delivered(alone, replay):
    """H04: the draft runs on past the end; what is kept ends where the text does. The next turn goes on."""
    first, _ = alone
    drafter = Foresight(first, 8)
    drafter.chance.choice = max  # all drafts, all right
    engine = engine_of(replay, drafter, 8, **CACHED)
    got, _ = serve(engine, prompts(), 19)
    assert got == {name: tokens[:19] for name, tokens in first.items()}
    asked = {name: [*prompt, *first[name][:19]] for name, prompt in prompts().items()}
    drafter.known = {name: first[name][19:] for name in first}
    got, hits = serve(engine, asked, TOKENS - 19)
    assert got == {name: tokens[19:] for name, tokens in first.items()}
    assert all(hits[name] == (len(tokens) - 1) // 8 * 8 for name, tokens in asked.items())


@BOTH
def test_a_failed_step_and_an_abort_leave_the_others_right(alone, replay):
    first, _ = alone
    model, drafter = small_model(CONFIG, state_replay=replay), Foresight(first, 3)
    engine = engine_of(replay, drafter, 3, model)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    got = {name: [] for name in first}
    for name, prompt in prompts().items():
        engine.submit(
            Request(name, prompt, params), lambda update: got[update.request_id].extend(update.tokens)
        )
    for turn in range(200):
        if turn == 6:
            engine.abort("r1")
        if not engine.step():
            break
        engine.cache.check()
    assert engine.cache.slots.used == 0
    assert {name: got[name] for name in ("r0", "r2", "r3")} == {
        name: first[name] for name in ("r0", "r2", "r3")
    }
    assert got["r1"] == first["r1"][: len(got["r1"])]


def test_pools_of_the_engine_are_as_large_as_their_slots_say():
    for replay in (True, False):
        engine = engine_of(replay, Foresight({}, 8), 8, **CACHED)
        kda = engine.pools[0]
        private = 1 + 3 * (1 if replay else 9)
        assert engine.cache.slots.size == private
        assert kda.state.shape[0] == engine.cache.total_slots > private
        assert {t.shape[0] for t in kda[2:]} == {private if replay else 0}
        assert isinstance(kda.state, torch.Tensor)
