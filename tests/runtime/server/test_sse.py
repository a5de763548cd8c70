"""Disconnects: whoever hangs up, at whatever moment, leaves nothing running and no neighbour disturbed."""

import asyncio
import json
import os
import random
import socket
import threading
import time

import httpx
import pytest
from fake_engine import FakeEngine
from k3compile.runtime.server.sse import encode, unless_disconnected
from serving import ANSWER, LiveServer, ids_of, make_app, says, wait_until

FULL = bool(os.environ.get("K3_ACCEPT"))  # every check at its full count


def test_an_event_is_one_line_of_json_and_an_empty_line():
    assert encode({"a": "é\n"}) == 'data: {"a":"é\\n"}\n\n'.encode()
    assert encode("[DONE]") == b"data: [DONE]\n\n"


def test_work_is_cancelled_when_the_client_hangs_up():
    async def go():
        state = []

        async def receive():
            await asyncio.sleep(0.01)
            return {"type": "http.disconnect"}

        async def work():
            try:
                await asyncio.sleep(30)
            finally:
                state.append("ended")

        return await unless_disconnected(receive, work()), state

    assert asyncio.run(go()) == (None, ["ended"])


def test_a_fault_of_the_work_is_raised():
    async def go():
        async def receive():
            await asyncio.sleep(30)

        async def work():
            raise KeyError("x")

        await unless_disconnected(receive, work())

    with pytest.raises(KeyError):
        asyncio.run(go())


def hang_up_in_memory(app, path, body, engine, turns):
    """Run one request, let the engine turn so often, hang up, and wait for the application to end."""

    async def go():
        sent, incoming = [], asyncio.Queue()
        await incoming.put({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http",
            "server": ("test", 80), "client": ("test", 1), "root_path": "", "asgi": {"version": "3.0"},
        }  # fmt: skip
        task = asyncio.create_task(app(scope, incoming.get, send))
        while not engine.live:
            await asyncio.sleep(0.001)
        for _ in range(turns):
            engine.turn()
            await asyncio.sleep(0)
        await incoming.put({"type": "http.disconnect"})
        await task
        return sent

    return asyncio.run(asyncio.wait_for(go(), 20))


@pytest.mark.parametrize("turns", [0, 1, 10])  # before the first token, after it, deep in the answer
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_client_that_hangs_up_ends_its_requests(path, streamed, n, turns):
    engine = FakeEngine(says("a" * 400), manual=True)
    body = {"n": n, "stream": streamed, "max_tokens": 300}
    body |= {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    hang_up_in_memory(make_app(engine), path, body, engine, turns)
    assert len(engine.aborted) == n
    assert not engine.live


def test_hanging_up_while_text_is_held_back_ends_the_request():
    held = "<|close|>response<|sep|><|open|>tools<|sep|><|open|>call " + "x" * 400
    engine = FakeEngine(says(held), manual=True)
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "reasoning_effort": "none"}
    hang_up_in_memory(make_app(engine), "/v1/chat/completions", body, engine, 12)
    assert len(engine.aborted) == 1


def test_hanging_up_when_all_is_over_aborts_nothing():
    engine = FakeEngine(says(ANSWER), manual=True)
    body = {"messages": [{"role": "user", "content": "x"}]}
    hang_up_in_memory(make_app(engine), "/v1/chat/completions", body, engine, len(ids_of(ANSWER)) + 1)
    assert engine.aborted == []


def impatient(url, rng):
    """Send a request over a raw socket and hang up after a moment."""
    host, port = url.split("//")[1].split("/")[0].split(":")
    body = json.dumps(
        {"prompt": "x", "n": rng.choice([1, 3]), "stream": rng.random() < 0.5, "max_tokens": 500}
    )
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall((head + body)[: rng.choice([20, 60, len(head + body), len(head + body)])].encode())
        time.sleep(rng.random() * 0.02)


def test_many_impatient_clients_leave_the_patient_one_alone():
    engine = FakeEngine(says("a" * 2000), pause_s=0.002, max_waiting=10_000)
    rng = random.Random(0)
    with LiveServer(engine) as live:
        text = []

        def patient():
            body = {"prompt": "x", "stream": True, "max_tokens": 400}
            with httpx.stream("POST", live.url + "/completions", json=body, timeout=30) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        text.append(json.loads(line[6:])["choices"][0]["text"])

        listener = threading.Thread(target=patient)
        listener.start()
        wait_until(lambda: engine.live)
        for _ in range(200 if FULL else 60):
            impatient(live.url, rng)
        listener.join(30)
        assert "".join(text) == "a" * 400
        wait_until(lambda: not engine.live)
        assert httpx.get(live.url.replace("/v1", "/health")).status_code == 200
