"""What the endpoints share: refusals become statuses."""

import asyncio

import pytest
from fake_engine import FakeEngine
from k3compile.runtime.engine import EngineClosed
from k3compile.runtime.request import Request
from k3compile.runtime.server.errors import ApiError
from k3compile.runtime.server.server_config import ServerConfig
from k3compile.runtime.server.service import Service
from serving import says, tokenizer


def refusal(engine, requests):
    async def go():
        Service(engine, tokenizer(), ServerConfig(retry_after_s=9)).generate(requests)

    with pytest.raises(ApiError) as error:
        asyncio.run(go())
    return error.value


def test_a_full_queue_is_429_with_a_time_to_come_back():
    error = refusal(FakeEngine(says("x"), manual=True, max_waiting=1), [Request("a", [1]), Request("b", [1])])
    assert (error.status, error.code, error.headers["Retry-After"]) == (429, "queue_full", "9")


def test_an_engine_that_closes_under_our_hands_is_503():
    class Closing(FakeEngine):
        def submit(self, request, on_update):
            raise EngineClosed("the engine is stopping")

    error = refusal(Closing(says("x"), manual=True), [Request("a", [1])])
    assert (error.status, error.message) == (503, "the engine is stopping")


def test_a_model_may_be_left_out_or_named_right():
    service = Service(FakeEngine(says("x"), manual=True), tokenizer(), ServerConfig(model_name="m"))
    service.check_model(None)
    service.check_model("m")
    with pytest.raises(ApiError, match="this server has 'm'"):
        service.check_model("x" * 10_000)


def test_new_requests_and_probes_are_told_what_ended_the_engine():
    engine = FakeEngine(says("x"), manual=True)
    service = Service(engine, tokenizer(), ServerConfig())
    engine.alive, engine.last_error = False, "rank 1 is gone"
    assert service.health() == "rank 1 is gone"
    with pytest.raises(ApiError, match="rank 1 is gone") as error:
        service.check_open()
    assert error.value.status == 503
