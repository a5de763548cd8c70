"""Requests that live and end together: all or none submitted, stopped once, never heard of again."""

import asyncio

import pytest
from fake_engine import FakeEngine
from k3compile.runtime.engine import QueueFull
from k3compile.runtime.request import Request, SamplingParams
from k3compile.runtime.server.generation import Generation
from serving import says


def requests(count, max_tokens=5):
    return [Request(f"r{i}", [1], SamplingParams(max_tokens=max_tokens)) for i in range(count)]


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def test_updates_of_all_requests_arrive_until_each_has_ended():
    async def go():
        generation = Generation(FakeEngine(says("abcdefgh")), requests(3))
        generation.submit()
        got = [[], [], []]
        async for index, update in generation.updates():
            got[index] += update.tokens
        return got

    assert [len(tokens) for tokens in run(go())] == [5, 5, 5]


def test_when_one_is_refused_the_others_are_taken_back():
    async def go():
        engine = FakeEngine(says("abc"), max_waiting=2, manual=True)
        generation = Generation(engine, requests(3))
        with pytest.raises(QueueFull):
            generation.submit()
        return engine

    engine = run(go())
    assert engine.aborted == ["r0", "r1"]
    assert engine.reasons == ["abort", "abort"]
    assert not engine.live


def test_a_stopped_request_is_not_heard_of_again_and_the_others_go_on():
    async def go():
        engine = FakeEngine(says("abcdefgh"), manual=True)
        generation = Generation(engine, requests(2))
        generation.submit()
        engine.turn()
        heard = []
        async for index, _ in generation.updates():
            heard.append(index)
            generation.stop(0)
            generation.stop(0)
            engine.turn()
        return engine, heard

    engine, heard = run(go())
    assert engine.aborted == ["r0"]
    assert heard.count(0) == 1
    assert heard.count(1) == 5


def test_closing_ends_what_still_runs_and_is_harmless_later():
    async def go():
        engine = FakeEngine(says("abc"), manual=True)
        generation = Generation(engine, requests(2))
        generation.submit()
        generation.close()
        generation.close()
        return engine, [item async for item in generation.updates()]

    engine, left = run(go())
    assert engine.aborted == ["r0", "r1"]
    assert left == []
