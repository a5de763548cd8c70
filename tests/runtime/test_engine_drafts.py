"""Drafts under the engine: greedy answers stay what they are, whatever is proposed, accepted or thrown out.

The drafter knows the answers, so a test says how many drafts are right. The model is the toy, exact in every
token; its records, like those of a KDA layer, are of no use to anybody but the row that wrote them.
"""

import functools
import itertools
import random

import pytest
import torch
from k3compile.runtime.request import Request
from k3compile.runtime.speculate.adaptive import Adaptive
from k3compile.runtime.speculate.costs import CostTable
from k3compile.runtime.speculate.draft import Draft
from lanes import slow
from oracle_drafter import OracleDrafter

DRAFTS = 7
REPLAY = pytest.mark.parametrize("replay", [True, False], ids=["replay", "states"])


@pytest.fixture
def oracle(toy):
    """Makes drafters whose first right(request) drafts are right."""

    def make(right, num_drafts=DRAFTS):
        return OracleDrafter(lambda prompt: toy.alone(prompt, 120), toy.VOCAB, num_drafts, right)

    return make


def engine_of(toy, drafter, **config):
    settings = {"num_drafts": DRAFTS, "num_pages": 200, "max_num_batched_tokens": 200, **config}
    return toy.engine(config.pop("model", None), drafter=drafter, **settings)


def counts(engine):
    stats = engine.stats()
    return stats.drafts_proposed, stats.drafts_accepted


def text(toy, length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(toy.VOCAB) for _ in range(length)]


@REPLAY
@pytest.mark.parametrize("right", range(DRAFTS + 1))
def test_any_number_of_right_drafts_gives_the_same_answer_in_fewer_steps(toy, oracle, right, replay):
    engine = engine_of(toy, oracle(lambda request: right), state_replay=replay)
    prompt = text(toy, 10)
    heard = toy.run(engine, [Request("a", prompt, toy.greedy(41))])["a"]
    assert heard.tokens == toy.alone(prompt, 41)
    steps = engine.stats().steps
    assert steps <= 1 + -(-40 // (right + 1)) + 1
    assert engine.stats().accepted_length >= 1 + right - 1
    assert [len(u.tokens) for u in heard.updates[1:-1]] == [right + 1] * (steps - 2)


@REPLAY
def test_each_request_keeps_its_own_count_when_rows_change_hands(toy, oracle, replay):
    """H06: accepted 4, 1, 3 and 2 beside each other; the first ends and a new one takes its row and slot."""
    accepted = {"a": 4, "b": 1, "c": 3, "d": 2, "e": 0, "f": DRAFTS}
    engine = engine_of(toy, oracle(lambda r: accepted[r.id]), state_replay=replay, max_num_seqs=4)
    lengths = {"a": 12, "b": 40, "c": 40, "d": 40, "e": 30, "f": 30}
    requests = [Request(n, text(toy, 9, seed=i), toy.greedy(lengths[n])) for i, n in enumerate(accepted)]
    heard = toy.run(engine, requests)
    for request in requests:
        assert heard[request.id].tokens == toy.alone(request.prompt, lengths[request.id]), request
        gained = [len(u.tokens) for u in heard[request.id].updates[1:-1]]
        assert set(gained) <= {accepted[request.id] + 1}


@REPLAY
@pytest.mark.parametrize(
    ("stop_at", "max_tokens", "kept", "finish"),
    [
        (3, 5, 3, "stop"),
        (5, 3, 3, "length"),
        (1, 9, 1, "stop"),
        (9, 1, 1, "length"),
        (8, 20, 8, "stop"),
        (5, 5, 5, "stop"),
    ],
)
def test_the_earlier_of_stop_and_limit_ends_a_block(toy, oracle, stop_at, max_tokens, kept, finish, replay):
    """H07: all drafts are right. The block starts after the first token of an answer."""
    prompt = next(p for p in (text(toy, 9, seed=s) for s in range(99)) if len(set(toy.alone(p, 12))) == 12)
    answer = toy.alone(prompt, 12)
    stop = answer[stop_at]
    params = toy.greedy(max_tokens + 1, stop_token_ids=(stop,))
    engine = engine_of(toy, oracle(lambda r: DRAFTS), state_replay=replay)
    heard = toy.run(engine, [Request("a", prompt, params)])["a"]
    assert (heard.tokens, heard.finish) == (answer[: kept + 1], finish)
    assert heard.updates[-1].completion_tokens == kept + 1


@REPLAY
@pytest.mark.parametrize("length", range(49, 66, 3))
def test_nothing_behind_a_stop_reaches_the_cache(toy, oracle, length, replay):
    """H04: seven right drafts, the stop is the third; a place for a state is before, at or behind it."""
    engine = engine_of(
        toy, oracle(lambda r: DRAFTS), state_replay=replay, prefix_cache=True, block_size=8, page_size=4
    )
    prompt = text(toy, length, seed=length)
    answer = toy.alone(prompt, 30)
    stop = next(i for i in range(11, 30) if answer[i] not in answer[:i])
    params = toy.greedy(30, stop_token_ids=(answer[stop],))
    heard = toy.run(engine, [Request("a", prompt, params)])["a"]
    assert heard.tokens == answer[: stop + 1]
    known = length + stop
    for node in engine.cache.index:
        assert node.tokens <= known
    turn = [*prompt, *heard.tokens, *text(toy, 10)]
    engine.speculation.drafter = None
    next_turn = toy.run(engine, [Request("b", turn, toy.greedy(9))])["b"]
    assert next_turn.tokens == toy.alone(turn, 9)
    assert next_turn.updates[-1].cached_tokens == known // 8 * 8


@REPLAY
def test_a_state_inside_verified_rows_is_the_one_of_its_count(toy, oracle, replay):
    """Every state the index keeps is held against a run of exactly its tokens."""
    engine = engine_of(
        toy, oracle(lambda r: 5), state_replay=replay, prefix_cache=True, block_size=4, page_size=4
    )
    prompt = text(toy, 21)
    heard, listener = Request("a", prompt, toy.greedy(70)), toy.Listener()
    engine.submit(heard, listener)
    whole = [*prompt, *toy.alone(prompt, 70)]
    seen = set()
    while engine.step():
        for node in engine.cache.index:
            if node.state:
                state = 0.0
                for token in whole[: node.tokens]:
                    state = (31 * state + 7 * token + 3) % (2**25 - 39)
                assert float(engine.pools[0].state[node.state, 0, 0, 0]) == state
                window = engine.pools[0].window[node.state, :, 0].tolist()
                assert window == whole[node.tokens - 3 : node.tokens]
                seen.add(node.tokens)
    assert len(seen) > 10


@REPLAY
@pytest.mark.parametrize("cached", [slow(False), True])
def test_preemption_and_abort_at_every_step(toy, oracle, cached, replay):
    """Three requests that share their beginning; at each step of the run, one after the other is hit."""
    asked = [[*text(toy, 18), *text(toy, 5 + i, seed=i + 1)] for i in range(3)]

    answers = [toy.alone(p, 14) for p in asked]

    def run(at, hit):
        engine = engine_of(
            toy,
            oracle(lambda r: (r.output_tokens + len(r.id)) % 4, num_drafts=3),
            num_drafts=3,
            state_replay=replay,
            max_num_batched_tokens=24,
            max_num_seqs=3,
            **({"prefix_cache": True, "block_size": 8, "num_checkpoints": 4} if cached else {}),
        )
        requests = [Request("x" * (i + 1), p, toy.greedy(14)) for i, p in enumerate(asked)]
        heard = {r.id: toy.Listener() for r in requests}
        for r in requests:
            engine.submit(r, heard[r.id])
        step = 0
        while engine.step():
            engine.cache.check()
            if step == at:
                hit(engine)
            step += 1
        toy.assert_nothing_left(engine)
        return step, heard, requests

    def preempt(engine, who):
        if who < len(engine.scheduler.running):
            engine.scheduler.preempt(engine.scheduler.running[who])

    def abort(engine, who):
        engine.abort("x" * (who + 1))

    steps, *_ = run(-1, None)
    for at, who, hit in itertools.product(range(steps), range(3), (preempt, abort)):
        _, heard, requests = run(at, functools.partial(hit, who=who))
        for i, r in enumerate(requests):
            expected, got = answers[i], heard[r.id]
            assert got.tokens == expected[: len(got.tokens)], (at, who, hit)
            assert len(got.tokens) == 14 or (hit is abort and i == who)


def test_a_preempted_request_loses_its_drafts_and_the_drafter_is_told(toy, oracle):
    drafter = oracle(lambda r: DRAFTS)
    engine = engine_of(toy, drafter)
    request, heard = Request("a", text(toy, 9), toy.greedy(40)), toy.Listener()
    engine.submit(request, heard)
    engine.step()
    assert len(request.drafts) == DRAFTS
    engine.scheduler.preempt(request)
    assert (request.drafts, request.proposal) == ([], None)
    engine.step()
    assert drafter.forgotten == ["a"]
    while engine.step():
        pass
    assert heard.tokens == toy.alone(request.prompt, 40)
    assert drafter.forgotten == ["a", "a"]


def test_nobody_drafts_for_a_prompt_under_way_or_for_a_last_token(toy, oracle):
    drafter = oracle(lambda r: 0)
    engine = engine_of(toy, drafter, max_num_batched_tokens=16)
    toy.run(engine, [Request("long", text(toy, 60), toy.greedy(1)), Request("two", [5], toy.greedy(2))])
    assert drafter.proposed == []
    toy.run(engine, [Request("three", [5], toy.greedy(3))])
    assert drafter.proposed == ["three"]


def test_a_drafter_that_breaks_is_switched_off_and_nobody_notices(toy, oracle):
    drafter = oracle(lambda r: 3)
    engine = engine_of(toy, drafter)
    prompt = text(toy, 9)

    def broken(requests, holdings):
        raise RuntimeError("no idea")

    request, heard = Request("a", prompt, toy.greedy(40)), toy.Listener()
    engine.submit(request, heard)
    for _ in range(3):
        engine.step()
    drafter.propose = broken
    while engine.step():
        pass
    assert heard.tokens == toy.alone(prompt, 40)
    assert engine.speculation.drafter is None
    assert engine.speculation.error == "RuntimeError: no idea"


@pytest.mark.parametrize(
    ("proposed", "error"),
    [
        (lambda requests: [Draft([5, 97]) for _ in requests], "97"),
        (lambda requests: [Draft([5])] * (len(requests) + 1), "requests"),
        (lambda requests: [Draft([5, 6], torch.ones(1, 97)) for _ in requests], "probs"),
        (lambda requests: [Draft([5] * 9) for _ in requests], None),
        (lambda requests: [Draft([-1]) for _ in requests], None),
    ],
)
def test_a_draft_that_cannot_be_verified_costs_nobody_an_answer(toy, oracle, proposed, error):
    engine = engine_of(toy, drafter := oracle(lambda r: 3))
    drafter.propose = lambda requests, holdings: proposed(requests)
    asked = [Request(n, text(toy, 9, seed=i), toy.greedy(12)) for i, n in enumerate("ab")]
    heard = toy.run(engine, asked)
    for request in asked:
        assert heard[request.id].tokens == toy.alone(request.prompt, 12)
    assert (engine.speculation.error is None) == (error is None)
    assert error is None or error in engine.speculation.error


def test_a_settlement_that_fails_ends_the_requests_of_its_step(toy, oracle):
    engine = engine_of(toy, oracle(lambda r: 3), prefix_cache=True, block_size=8)
    a, b = (Request(n, text(toy, 9, seed=i), toy.greedy(20)) for i, n in enumerate("ab"))
    heard = {r.id: toy.Listener() for r in (a, b)}
    engine.submit(a, heard["a"])
    while not heard["a"].tokens:
        engine.step()
    told = len(heard["a"].tokens)
    settle = engine.speculation._settle

    def broken(batch, verdicts):
        raise RuntimeError("no such kernel")

    engine.speculation._settle = broken
    before = {n.tokens for n in engine.cache.index if n.state}
    engine.step()
    assert (heard["a"].finish, heard["a"].error) == ("error", "RuntimeError: no such kernel")
    assert {n.tokens for n in engine.cache.index if n.state} == before
    assert heard["a"].tokens == toy.alone(a.prompt, 20)[:told]
    engine.cache.check()
    engine.speculation._settle = settle
    engine.submit(b, heard["b"])
    while engine.step():
        pass
    assert heard["b"].tokens == toy.alone(b.prompt, 20)


def test_logprobs_come_for_each_token_of_a_block(toy, oracle):
    engine = engine_of(toy, oracle(lambda r: 4))
    prompt = text(toy, 9)
    heard = toy.run(engine, [Request("a", prompt, toy.greedy(18, logprobs=1))])["a"]
    for update in heard.updates:
        assert [entry.token for entry in update.logprobs] == update.tokens
    assert heard.tokens == toy.alone(prompt, 18)


def test_drafts_are_counted_by_position(toy, oracle):
    engine = engine_of(toy, oracle(lambda r: 2, num_drafts=4), num_drafts=4)
    toy.run(engine, [Request("a", text(toy, 9), toy.greedy(31))])
    assert counts(engine) == ((10, 10, 9, 9), (10, 10, 0, 0)), "no draft for tokens past the end"
    assert engine.stats().accepted_length == 3.0


@REPLAY
def test_another_forward_is_measured_when_nobody_can_be_hurt(toy, oracle, replay):
    engine = engine_of(toy, oracle(lambda request: 3), state_replay=replay)
    old, measured = engine._forward, []

    def measure(forward):
        measured.append((forward, engine.cache.slots.used))
        return CostTable((1,), (0.1,))

    engine.speculation.adaptive = Adaptive(CostTable((1, 2), (0.1, 0.1)), measure=measure)

    def forward(step):
        return old(step)

    ended = []
    engine.submit(Request("a", text(toy, 10), toy.greedy(41)), lambda update: ended.append(update.finish))
    for _ in range(4):
        engine.step()
    engine.use(forward)
    while engine.step():
        assert bool(measured) == replay  # without records the rows to measure take the slots of requests
    toy.run(engine, [Request("b", text(toy, 10), toy.greedy(5))])
    assert ended[-1] == "length"
    assert measured == [(forward, 1 if replay else 0)]
    assert engine.speculation.adaptive.verify.rows == (1,)
