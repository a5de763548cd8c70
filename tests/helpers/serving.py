"""An application in front of a fake engine, asked in memory or over a loopback socket."""

from __future__ import annotations

import asyncio
import functools
import json
import tempfile
import threading
import time
from pathlib import Path

import httpx
from fake_engine import FakeEngine
from k3compile.runtime.server.app import build_app
from k3compile.runtime.server.run import Server, bind, url_of
from k3compile.runtime.server.server_config import ServerConfig
from k3compile.runtime.tokenizer import Tokenizer
from k3compile.runtime.tokenizer_train import train_bpe

ANSWER = "Let me think.<|close|>think<|sep|><|open|>response<|sep|>Grüße!<|close|>response<|sep|>"
ANSWER += "<|close|>message<|sep|><|end_of_msg|>"


@functools.cache
def tokenizer(ranks: int = 768) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tiktoken.model").write_bytes(train_bpe(None, ranks))
        return Tokenizer(folder)


def ids_of(text: str) -> list[int]:
    """Ids of a model's output, control tokens spelled out."""
    return tokenizer()._encoding.encode(text, allowed_special="all")


def says(text: str):
    """A script: every request gets this text."""
    return lambda request: ids_of(text)


def make_app(engine=None, **config):
    engine = engine or FakeEngine(says(ANSWER))
    return build_app(engine, tokenizer(), ServerConfig(model_name="k3-test", **config), "9.9")


def ask(app, method: str, path: str, **request) -> httpx.Response:
    """One request in memory; a stream comes back whole."""

    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **request)

    return asyncio.run(asyncio.wait_for(go(), 30))


def complete(app, expect: int = 200, **body) -> dict:
    return checked(ask(app, "POST", "/v1/completions", json=body), expect)


def chat(app, expect: int = 200, **body) -> dict:
    body.setdefault("messages", [{"role": "user", "content": "Hi"}])
    return checked(ask(app, "POST", "/v1/chat/completions", json=body), expect)


def checked(response: httpx.Response, expect: int) -> dict:
    assert response.status_code == expect, response.text
    return response.json()


def events(response: httpx.Response) -> list[dict]:
    """The chunks of a stream; the end mark is checked."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: ") for block in blocks[:-1])
    return [json.loads(block[6:]) for block in blocks[:-2]]


def stream(app, path: str, **body) -> list[dict]:
    return events(ask(app, "POST", path, json={**body, "stream": True}))


def wait_until(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


class LiveServer:
    """The application on a loopback port of its own, in a thread; ``url`` ends in /v1."""

    def __init__(self, engine, **config):
        self.config = ServerConfig(model_name="k3-test", port=0, **config)
        self.engine = engine
        self.app = build_app(engine, tokenizer(), self.config, "9.9")

    def __enter__(self):
        listener = bind(self.config)
        self.url = url_of(listener)
        self.server = Server(self.app, self.engine, self.config, lambda: None)
        self._thread = threading.Thread(target=self.server.run, args=([listener],), daemon=True)
        self._thread.start()
        wait_until(lambda: self.server.started)
        return self

    def __exit__(self, *exc):
        self.server.stop(0.0)
        self._thread.join(10)
        assert not self._thread.is_alive(), "the server did not end"


def makes_chunks(kind, text: str, block: int = 1, **body) -> list[dict]:
    """Chunks of a streamed chat whose model says ``text``; kind: the class of engine."""
    body.setdefault("messages", [{"role": "user", "content": "Hi"}])
    return stream(make_app(kind(says(text), block=block)), "/v1/chat/completions", **body)
