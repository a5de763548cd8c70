"""The engine over the toy model: every token right in every company, and nothing stops the service."""

import random
import threading
import time

import pytest
import torch
from k3compile.runtime.engine import EngineClosed, QueueFull
from k3compile.runtime.request import Request, SamplingParams
from lanes import thinned


@pytest.fixture
def started(toy):
    """Engines on their threads, stopped at the end."""
    engines = []

    def start(model=None, **config):
        engine = toy.engine(model, **config)
        engine.start()
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.stop()


def wait_for(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def traffic(rng: random.Random, count: int, toy, longest=60) -> list[Request]:
    return [
        Request(
            f"r{i}",
            [rng.randrange(toy.VOCAB) for _ in range(rng.choice([1, 2, 5, 16, longest]))],
            toy.greedy(rng.randint(1, 30)),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("budget", [4, 9, 32, 2000])
@pytest.mark.parametrize("pages", [24, 400])
def test_together_everybody_gets_what_they_get_alone(toy, budget, pages):
    engine = toy.engine(num_pages=pages, max_num_batched_tokens=budget, max_num_seqs=5)
    requests = traffic(random.Random(budget), 20, toy)
    heard = toy.run(engine, requests)
    for request in requests:
        assert heard[request.id].tokens == toy.alone(request.prompt, request.params.max_tokens)
    assert (engine.stats().preemptions > 0) == (pages == 24)


def test_a_preempted_request_goes_on_as_if_nothing_had_happened(toy):
    """A is thrown out at decode token 37, C works in its slot and pages, then A comes back (H02)."""
    engine = toy.engine(page_size=1, num_pages=82, max_num_seqs=2, max_num_batched_tokens=64)
    heard = {name: toy.Listener() for name in "BAC"}
    b, a = Request("B", [66] * 4, toy.greedy(42)), Request("A", [65] * 4, toy.greedy(42))
    c = Request("C", [67] * 6, toy.greedy(3), priority=-1)
    engine.submit(b, heard["B"])
    engine.submit(a, heard["A"])
    engine.step()
    old_slot = engine.cache.holding(a).slot
    while not a.preemptions:
        engine.step()
    assert (a.output_tokens, a.seen) == (37, 0)
    engine.submit(c, heard["C"])
    engine.step()
    assert engine.cache.holding(c).slot == old_slot
    while engine.step():
        engine.cache.check()
    assert a.preemptions == 1
    for request in (b, a, c):
        expected = toy.alone(request.prompt, request.params.max_tokens)
        assert heard[request.id].tokens == expected, request


def test_a_slot_that_is_not_cleared_would_be_noticed(toy, monkeypatch):
    engine = toy.engine(max_num_seqs=1)
    monkeypatch.setattr(engine.cache, "take_writes", list)
    engine.pools[0].state.zero_()
    engine.pools[0].window.zero_()
    first, second = Request("a", [5] * 6, toy.greedy(3)), Request("b", [5] * 6, toy.greedy(3))
    heard = toy.run(engine, [first, second])
    assert heard["a"].tokens == toy.alone(first.prompt, 3)
    assert heard["b"].tokens != toy.alone(second.prompt, 3)


def test_without_a_free_slot_requests_wait_and_the_engine_lives(toy):
    engine = toy.engine(num_pages=400, max_num_seqs=2)
    requests = [Request(f"r{i}", [i] * 5, toy.greedy(6)) for i in range(9)]
    heard = toy.run(engine, requests)
    assert all(heard[r.id].tokens == toy.alone(r.prompt, 6) for r in requests)


@pytest.mark.parametrize("seed", thinned(range(6), 3))
def test_random_traffic_with_aborts_gives_everybody_their_tokens(toy, seed):
    rng = random.Random(seed)
    engine = toy.engine(
        num_pages=rng.choice([24, 60]),
        page_size=rng.choice([4, 8]),
        max_num_batched_tokens=rng.choice([6, 17, 64]),
        max_num_seqs=rng.choice([2, 5]),
        prefix_cache=rng.choice([False, True]),
        block_size=8,
    )
    requests, heard = traffic(rng, 120, toy, longest=40), {}
    todo = list(requests)
    while todo or not engine.scheduler.idle:
        if todo and rng.random() < 0.3:
            request = todo.pop()
            heard[request.id] = toy.Listener()
            engine.submit(request, heard[request.id])
        if heard and rng.random() < 0.03:
            engine.abort(rng.choice(list(heard)))
        engine.step()
    engine.step()
    toy.assert_nothing_left(engine)
    finishes = [heard[r.id].finish for r in requests]
    assert set(finishes) <= {"length", "abort"}
    assert finishes.count("length") > 60
    for request in requests:
        expected = toy.alone(request.prompt, request.params.max_tokens)
        got = heard[request.id].tokens
        assert got == expected[: len(got)]
        assert heard[request.id].finish == "abort" or got == expected


def test_eos_ends_an_answer_and_is_delivered(toy):
    prompt = [3, 4, 5]
    free = toy.alone(prompt, 30)
    eos = free[6]
    first = free.index(eos)
    engine = toy.engine(toy.Model(eos=(eos,)))
    requests = [
        Request("stops", prompt, toy.greedy(30)),
        Request("ignores", prompt, toy.greedy(30, ignore_eos=True)),
        Request("own", prompt, toy.greedy(30, ignore_eos=True, stop_token_ids=(free[3],))),
    ]
    heard = toy.run(engine, requests)
    assert (heard["stops"].tokens, heard["stops"].finish) == (free[: first + 1], "stop")
    assert (heard["ignores"].tokens, heard["ignores"].finish) == (free, "length")
    assert heard["own"].tokens == free[: free.index(free[3]) + 1]


def test_min_tokens_keeps_the_stop_out_and_not_only_unseen(toy):
    prompt = [3, 4, 5]
    eos = toy.alone(prompt, 1)[0]
    engine = toy.engine(toy.Model(eos=(eos,)))
    heard = toy.run(engine, [Request("a", prompt, toy.greedy(30, min_tokens=10))])
    assert eos not in heard["a"].tokens[:10]
    assert len(heard["a"].tokens) > 10


def test_the_context_limit_ends_an_answer_with_length(toy):
    engine = toy.engine(max_model_len=12)
    heard = toy.run(engine, [Request("a", [1] * 5, SamplingParams(temperature=0.0))])
    assert (len(heard["a"].tokens), heard["a"].finish) == (7, "length")


def test_logprobs_come_with_each_token(toy):
    engine = toy.engine()
    with_them = Request("a", [1] * 5, toy.greedy(4, logprobs=2))
    heard = toy.run(engine, [with_them, Request("b", [1] * 5, toy.greedy(4))])
    listed = [entry for u in heard["a"].updates for entry in u.logprobs]
    assert [entry.token for entry in listed] == heard["a"].tokens
    assert all(entry.top[0] == (entry.token, entry.logprob) for entry in listed)
    assert all(u.logprobs is None for u in heard["b"].updates)


def test_seeded_chance_does_not_depend_on_the_company(toy):
    def run(others):
        engine = toy.engine(num_pages=200)
        mine = Request("mine", [7, 8], SamplingParams(seed=5, max_tokens=20))
        return toy.run(engine, [*traffic(random.Random(1), others, toy), mine])["mine"].tokens

    assert run(0) == run(3) == run(9)


def test_a_failed_forward_ends_the_requests_of_that_step_and_no_other(toy):
    model = toy.Model()
    engine = toy.engine(model, max_num_seqs=2)
    requests = traffic(random.Random(0), 4, toy)
    heard = {r.id: toy.Listener() for r in requests}
    for r in requests:
        engine.submit(r, heard[r.id])
    model.fail_next = RuntimeError("no such kernel")
    while engine.step():
        engine.cache.check()
    assert [heard[r.id].finish for r in requests] == ["error", "error", "length", "length"]
    assert heard["r0"].error == "RuntimeError: no such kernel"
    for r in requests[2:]:
        assert heard[r.id].tokens == toy.alone(r.prompt, r.params.max_tokens)
    stats = engine.stats()
    assert (stats.failed_steps, stats.last_error) == (1, "RuntimeError: no such kernel")
    assert dict(stats.finished) == {"error": 2, "length": 2}
    assert engine.cache.pages.used == 0


def test_an_interrupted_step_leaves_the_books_right(toy):
    model = toy.Model()
    engine = toy.engine(model)
    listener = toy.Listener()
    engine.submit(Request("a", [5, 6], toy.greedy(5)), listener)
    model.fail_next = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert (listener.finish, listener.error) == ("error", "interrupted")
    assert toy.run(engine, [Request("b", [5, 6], toy.greedy(5))])["b"].tokens == toy.alone([5, 6], 5)


def test_a_request_whose_logits_are_not_finite_fails_alone(toy):
    model = toy.Model()
    engine = toy.engine(model)
    requests = [Request("a", [1, 2], toy.greedy(5)), Request("b", [3, 4], toy.greedy(5))]
    plain = model.logits

    def spoiled(hidden):
        out = plain(hidden)
        out[0] = torch.nan
        model.logits = plain
        return out

    engine.executor.logits = lambda hidden: model.logits(hidden)
    model.logits = spoiled
    heard = toy.run(engine, requests)
    assert heard["a"].error == "the model's logits are not finite"
    assert heard["b"].tokens == toy.alone([3, 4], 5)


def test_a_listener_that_fails_loses_its_request_and_nobody_else_does(toy):
    engine = toy.engine()
    good = toy.Listener()

    def bad(update):
        raise KeyError("gone")

    engine.submit(Request("bad", [1] * 4, toy.greedy(50)), bad)
    engine.submit(Request("good", [2] * 4, toy.greedy(10)), good)
    while engine.step():
        pass
    assert good.tokens == toy.alone([2] * 4, 10)
    assert engine.stats().finished == {"abort": 1, "length": 1}
    assert engine.cache.pages.used == 0


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([97], {}, "prompt holds a token id outside 0 to 96"),
        ([-1], {}, "prompt holds a token id outside 0 to 96"),
        ([5], {"stop_token_ids": (97,)}, r"stop_token_ids holds \[97\]"),
        ([5], {"logit_bias": {200: 1.0}}, r"logit_bias holds \[200\]"),
        ([5] * 300, {}, "prompt has 300 tokens"),
    ],
)
def test_what_would_hurt_others_is_refused_at_the_door(toy, prompt, params, message):
    engine = toy.engine()
    with pytest.raises(ValueError, match=message):
        engine.submit(Request("a", prompt, SamplingParams(**params)), toy.Listener())
    assert engine.stats().waiting == 0


def test_an_id_can_be_used_again_but_not_twice_at_once(toy):
    engine = toy.engine()
    engine.submit(Request("a", [5], toy.greedy(2)), toy.Listener())
    with pytest.raises(ValueError, match="id 'a' belongs to a request that is still running"):
        engine.submit(Request("a", [5], toy.greedy(2)), toy.Listener())
    while engine.step():
        pass
    heard = toy.run(engine, [Request("a", [5], toy.greedy(2))])
    assert heard["a"].tokens == toy.alone([5], 2)


def test_a_full_queue_refuses_and_takes_again_later(toy):
    engine = toy.engine(max_waiting=3)
    for i in range(3):
        engine.submit(Request(f"r{i}", [5], toy.greedy(2)), toy.Listener())
    with pytest.raises(QueueFull, match="3 requests wait, at most 3 may"):
        engine.submit(Request("r3", [5], toy.greedy(2)), toy.Listener())
    engine.step()
    engine.submit(Request("r3", [5], toy.greedy(2)), toy.Listener())


def test_an_end_that_the_caller_found_counts_as_a_stop(toy):
    engine, heard = toy.engine(), [toy.Listener(), toy.Listener()]
    for name, listener in zip("ab", heard):
        engine.submit(Request(name, [5], toy.greedy(50)), listener)
    engine.step()
    engine.abort("a", "stop")
    engine.abort("b")
    assert not engine.step()
    assert [listener.finish for listener in heard] == ["stop", "abort"]
    assert engine.stats().finished == {"stop": 1, "abort": 1}


def test_hang_ups_during_a_long_step_do_not_fill_the_queue(toy):
    engine = toy.engine(max_waiting=3)
    for i in range(2):
        engine.submit(Request(f"gone{i}", [5], toy.greedy(2)), toy.Listener())
    engine.scheduler.add(Request("taken", [5], toy.greedy(2)))
    engine._known.add("taken")
    for name in ("gone0", "gone1", "taken", "taken", *(f"nobody{i}" for i in range(9))):
        engine.abort(name)
    assert engine.stats().waiting == 0
    for i in range(3):
        engine.submit(Request(f"r{i}", [5], toy.greedy(2)), toy.Listener())
    assert engine.stats().waiting == 3
    with pytest.raises(QueueFull, match="3 requests wait, at most 3 may"):
        engine.submit(Request("r3", [5], toy.greedy(2)), toy.Listener())


def test_a_prompt_of_a_million_tokens_is_checked_in_no_time(toy):
    engine = toy.engine()
    request = Request("a", [5] * 1_000_000, toy.greedy(2))
    started = time.perf_counter()
    for _ in range(20):
        with pytest.raises(ValueError, match="prompt has 1000000 tokens"):
            engine.check(request)
    assert time.perf_counter() - started < 0.4, "the event loop waits meanwhile"


def test_the_forward_can_be_swapped_between_steps(toy):
    model, calls = toy.Model(), []
    engine = toy.engine(model)
    listener = toy.Listener()
    engine.submit(Request("a", [5, 6], toy.greedy(10)), listener)
    for _ in range(4):
        engine.step()

    def compiled(step):
        calls.append(1)
        return model.forward(step, engine.pools)

    engine.use(compiled)
    while engine.step():
        pass
    assert len(calls) == 6
    assert listener.tokens == toy.alone([5, 6], 10)


def test_the_thread_serves_while_requests_come_from_many_threads(toy, started):
    engine = started(num_pages=100, max_num_seqs=6)
    requests = traffic(random.Random(3), 60, toy)
    heard = {r.id: toy.Listener() for r in requests}

    def client(part):
        for r in part:
            engine.submit(r, heard[r.id])
            time.sleep(0.0005)

    threads = [threading.Thread(target=client, args=(requests[i::4],)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    wait_for(lambda: all(h.finish for h in heard.values()))
    for r in requests:
        assert heard[r.id].tokens == toy.alone(r.prompt, r.params.max_tokens)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.pages_used, stats.slots_used) == (0, 0, 0, 0)


def test_an_abort_takes_effect_before_the_next_step_and_frees_everything(toy, started):
    engine = started()
    doomed, other = toy.Listener(), toy.Listener()
    engine.submit(Request("doomed", [5] * 40, toy.greedy(200)), doomed)
    engine.submit(Request("other", [6] * 4, toy.greedy(60)), other)
    wait_for(lambda: doomed.tokens)
    engine.abort("doomed")
    engine.abort("nobody")
    wait_for(lambda: doomed.finish)
    assert doomed.finish == "abort"
    wait_for(lambda: other.finish)
    assert other.tokens == toy.alone([6] * 4, 60)
    assert engine.stats().pages_used == 0


def test_two_hundred_hang_ups_leak_nothing(toy, started):
    engine = started(num_pages=60)
    rng = random.Random(5)
    steady = toy.Listener()
    engine.submit(Request("steady", [9] * 3, toy.greedy(150)), steady)
    for i in range(200):
        engine.submit(Request(f"r{i}", [i % 97] * rng.randint(1, 40), toy.greedy(50)), toy.Listener())
        if rng.random() < 0.5:
            time.sleep(0.001)
        engine.abort(f"r{i}")
    wait_for(lambda: steady.finish and engine.stats().running == 0)
    assert steady.tokens == toy.alone([9] * 3, 150)
    engine.cache.check()
    assert (engine.stats().pages_used, engine.stats().slots_used) == (0, 0)


def test_stopping_lets_requests_end_within_the_drain_time(toy):
    engine = toy.engine()
    engine.start()
    listener = toy.Listener()
    engine.submit(Request("a", [5] * 4, toy.greedy(40)), listener)
    engine.stop(drain_s=10.0)
    assert listener.tokens == toy.alone([5] * 4, 40)
    with pytest.raises(EngineClosed, match="the engine is stopping"):
        engine.submit(Request("b", [5], toy.greedy(1)), toy.Listener())
    assert not engine.alive


@pytest.mark.parametrize("drains", [(60.0, 0.0), (0.0, 60.0)])
def test_a_second_stop_shortens_the_drain_and_never_lengthens_it(toy, started, drains):
    engine = started(num_pages=1100, max_model_len=4000)
    listener = toy.Listener()
    engine.submit(Request("a", [5] * 4, toy.greedy(3900)), listener)
    wait_for(lambda: listener.tokens)
    begun = time.monotonic()
    stops = [threading.Thread(target=engine.stop, args=(drain,)) for drain in drains]
    for thread in stops:
        thread.start()
    for thread in stops:
        thread.join(20)
    assert listener.finish == "abort"
    assert time.monotonic() - begun < 10


def test_what_does_not_end_in_the_drain_time_is_aborted(toy):
    model = toy.Model()
    engine = toy.engine(model)
    plain = engine._forward
    engine.use(lambda step: (time.sleep(0.01), plain(step))[1])
    engine.start()
    listener = toy.Listener()
    engine.submit(Request("a", [5] * 4, toy.greedy(200)), listener)
    wait_for(lambda: listener.tokens)
    start = time.monotonic()
    engine.stop(drain_s=0.05)
    assert time.monotonic() - start < 2.0
    assert listener.finish == "abort"
    assert engine.cache.pages.used == 0


@pytest.mark.parametrize("kind", [AssertionError, SystemExit])
def test_wrong_books_end_the_engine_and_everybody_is_told(toy, started, monkeypatch, kind):
    engine = started()
    listener = toy.Listener()

    def broken():
        raise kind("page 3 is owned twice")

    monkeypatch.setattr(engine.scheduler, "plan", broken)
    engine.submit(Request("a", [5] * 4, toy.greedy(5)), listener)
    wait_for(lambda: listener.finish)
    assert (listener.finish, engine.alive) == ("error", False)
    assert "page 3 is owned twice" in listener.error
    with pytest.raises(EngineClosed, match="the engine died"):
        engine.submit(Request("b", [5], toy.greedy(1)), toy.Listener())


def test_counts_add_up_and_a_replay_is_not_counted_twice(toy):
    engine = toy.engine(num_pages=24, max_num_batched_tokens=16)
    requests = traffic(random.Random(2), 12, toy)
    toy.run(engine, requests)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.prompt_tokens == sum(r.prompt_tokens for r in requests)
    assert stats.output_tokens == sum(r.output_tokens for r in requests)
    assert stats.rows > stats.prompt_tokens + stats.output_tokens - len(requests)
    assert sum(stats.time_to_first_token.counts) == sum(stats.time_of_request.counts) == len(requests)
    assert sum(stats.time_between_tokens.counts) == stats.output_tokens - len(requests)
    assert stats.current_step_s == 0.0


def test_a_step_that_takes_long_can_be_seen_from_outside(toy, started):
    engine = started()
    entered, leave = threading.Event(), threading.Event()
    plain = engine._forward

    def slow(step):
        entered.set()
        leave.wait(10)
        return plain(step)

    engine.use(slow)
    engine.submit(Request("a", [5], toy.greedy(1)), toy.Listener())
    assert entered.wait(10)
    time.sleep(0.03)
    assert engine.stats().current_step_s > 0.02
    leave.set()
    wait_for(lambda: engine.stats().running == 0)
