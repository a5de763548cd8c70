"""Jobs: counts that add up, whatever the engine reports and however many choices there are."""

import asyncio
from array import array

import pytest
from fake_engine import FakeEngine
from k3compile.runtime.request import Request
from k3compile.runtime.server import job as job_module
from k3compile.runtime.server.errors import ApiError
from k3compile.runtime.server.job import completion_job
from k3compile.runtime.server.schema import CompletionBody, parse
from k3compile.runtime.server.server_config import ServerConfig
from k3compile.runtime.server.service import Service
from serving import says, tokenizer


def job_of(engine, prompts, **fields):
    service = Service(engine, tokenizer(), ServerConfig(max_choices=8))
    return completion_job(service, parse(CompletionBody, {"prompt": "x", **fields}), prompts)


def finish(engine, prompts, **fields):
    async def go():
        job = job_of(engine, prompts, **fields)
        async for _ in job.pieces():
            pass
        return job

    return asyncio.run(asyncio.wait_for(go(), 20))


@pytest.mark.parametrize("block", [1, 7])
def test_usage_adds_up_and_prompts_count_once(block):
    engine = FakeEngine(says("abcdefghijkl"), block=block)
    usage = finish(engine, [[1, 2, 3], [4]], n=2, max_tokens=5).usage()
    assert usage["prompt_tokens"] == 4
    assert usage["completion_tokens"] == 4 * 5
    assert usage["total_tokens"] == 24


def test_cached_tokens_are_those_of_one_choice_a_prompt():
    engine = FakeEngine(says("abc"))
    engine.cached_tokens = 2
    job = finish(engine, [[1, 2, 3], [4, 5]], n=2, max_tokens=1)
    assert job.usage()["prompt_tokens_details"] == {"cached_tokens": 4}


@pytest.mark.parametrize("n", [0, -1, 5])
def test_the_number_of_answers_is_bounded(n):
    async def go():
        job_of(FakeEngine(says("x"), manual=True), [[1], [2]], n=n)

    with pytest.raises(ApiError, match="from 1 to 8 answers"):
        asyncio.run(go())


def test_seeds_differ_by_one_for_each_choice_of_a_prompt():
    engine = FakeEngine(says("abc"))
    finish(engine, [[1]], n=3, seed=-1, max_tokens=1)
    assert [request.params.seed for request in engine.seen] == [-1, 0, 1]


def test_the_salt_reaches_every_request():
    engine = FakeEngine(says("abc"))
    finish(engine, [[1], [2]], n=2, max_tokens=1, cache_salt="tenant 7")
    finish(engine, [[1]], max_tokens=1)
    assert [request.cache_salt for request in engine.seen] == ["tenant 7"] * 4 + [""]


def test_choices_copy_a_long_prompt_instead_of_reading_it_again(monkeypatch):
    """A list of a million tokens, read for each of 128 choices, stood the event loop still for seconds."""
    given = []

    def recorded(name, prompt, *args, **kwargs):
        given.append(prompt)
        return Request(name, prompt, *args, **kwargs)

    monkeypatch.setattr(job_module, "Request", recorded)
    engine = FakeEngine(says("x"), manual=True)

    async def go():
        job_of(engine, [[5, 6, 7]], n=8)

    asyncio.run(go())
    assert [request.prompt for request in engine.seen] == [[5, 6, 7]] * 8
    assert all(isinstance(prompt, array) for prompt in given)
    assert len({request.tokens.buffer_info() for request in engine.seen}) == 8, "a choice grows on its own"
