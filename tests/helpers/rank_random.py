"""Jobs of ranks that serve random requests whose clients change their minds: of an engine, and of a server.

with_engine    requests come, and are aborted, from another thread while the engine's own one serves
with_server    clients over HTTP read to the end, hang up in the middle, or at once
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
from k3compile.runtime.engine import Engine
from k3compile.runtime.request import Request
from k3compile.runtime.sampling_params import SamplingParams
from k3compile.runtime.server.app import build_app
from k3compile.runtime.server.run import Server, bind, url_of
from k3compile.runtime.server.server_config import ServerConfig
from k3compile.runtime.tokenizer import Tokenizer
from rank_serving import Seen, Way, give_back, on_rank
from rank_traffic import TEXT

from k3compile.cli.loading import SHIPPED

AT_ONCE = 16  # clients that wait for an answer
IDLE_S = 120.0


def with_engine(way: Way, count: int, seed: int) -> Seen:
    """``count`` requests, of which about a third are aborted: while they wait, in their prompt, or later."""

    def work(engine: Engine, serving: Any) -> Counter:
        rng, ended, errors = random.Random(seed), Counter(), []
        free = threading.Semaphore(AT_ONCE)

        def listen(update: Any) -> None:
            if update.error:
                errors.append(update.error)
            if update.finish is not None:
                ended[update.finish] += 1
                free.release()
            elif rng.random() < 0.1:
                engine.abort(update.request_id)

        engine.start()
        for number in range(count):
            free.acquire()
            request = random_request(rng, number)
            engine.submit(request, listen)
            if rng.random() < 0.15:
                time.sleep(rng.random() * 0.2)
                engine.abort(request.id)
        until_idle(engine, lambda: sum(ended.values()) == count)
        give_back(engine)
        assert not errors, errors[0]
        return ended

    return told(way, work)


def random_request(rng: random.Random, number: int) -> Request:
    """Noise behind one of four beginnings; some draw their tokens."""
    beginning = random.Random(rng.randrange(4))
    shared = [beginning.randrange(TEXT) for _ in range(rng.choice((0, 33, 64, 130)))]
    own = [rng.randrange(TEXT) for _ in range(rng.randrange(1, 40))]
    heat = rng.choice((0.0, 0.0, 1.0))
    params = SamplingParams(temperature=heat, max_tokens=rng.randrange(1, 7), ignore_eos=rng.random() < 0.5)
    return Request(f"random {number}", shared + own, params)


def with_server(way: Way, count: int, seed: int) -> Seen:
    """The same through a server on a port of rank 0's, by clients that may hang up."""

    def work(engine: Engine, serving: Any) -> Counter:
        config = ServerConfig(model_name="tiny", port=0)
        listener = bind(config)
        app = build_app(engine, Tokenizer(SHIPPED), config, "0")
        server = Server(app, engine, config, lambda: None)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        engine.start()
        thread.start()
        did, errors, numbers = Counter(), [], iter(range(count))
        with httpx.Client(timeout=IDLE_S) as http:
            clients = [
                threading.Thread(
                    target=client, args=(http, url_of(listener), seed * 100 + i, numbers, did, errors)
                )
                for i in range(AT_ONCE // 2)
            ]
            for one in clients:
                one.start()
            for one in clients:
                one.join()
        until_idle(engine, lambda: True)
        give_back(engine)
        server.stop(0.0)
        thread.join(IDLE_S)
        assert not thread.is_alive(), "the server did not end"
        assert not errors, errors[0]
        return did

    return told(way, work)


def client(http: httpx.Client, url: str, seed: int, numbers: Any, did: Counter, errors: list) -> None:
    """Ask until ``numbers`` end, and count what was done."""
    rng = random.Random(seed)
    for _ in numbers:
        prompt = list(random_request(rng, 0).tokens)
        body = {"model": "tiny", "prompt": prompt, "max_tokens": rng.randrange(2, 9), "ignore_eos": True}
        kind = rng.choice(("read", "read", "hang up", "leave"))
        try:
            chunks = ask(http, url, {**body, "temperature": 0, "stream": True}, kind)
        except Exception as error:  # of any kind: the job reports it, a thread could only print it
            errors.append(repr(error))
            return
        did[kind] += 1
        did["chunks"] += chunks


def ask(http: httpx.Client, url: str, body: dict, kind: str) -> int:
    """One request; how many chunks came before the client went."""
    chunks = 0
    with http.stream("POST", f"{url}/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        if kind == "leave":
            return 0
        for line in response.iter_lines():
            chunks += line.startswith("data: {")
            assert '"error"' not in line, line
            if kind == "hang up" and chunks:
                return chunks
    assert chunks
    return chunks


def until_idle(engine: Engine, also: Callable[[], bool]) -> None:
    """Wait until nothing runs or waits."""
    until = time.monotonic() + IDLE_S
    while time.monotonic() < until:
        stats = engine.stats()
        if stats.running == stats.waiting == 0 and also():
            return
        time.sleep(0.02)
    raise AssertionError(f"requests are left: {engine.stats()}")


def told(way: Way, work: Callable[[Engine, Any], Counter]) -> Seen:
    """Run it; rank 0 tells what happened."""
    counted: dict[str, Any] = {}

    def checked(engine: Engine, serving: Any) -> Counter:
        did = work(engine, serving)
        stats = engine.stats()
        counted.update(did, hits=stats.prefix_hit_tokens, steps=stats.steps)
        return did

    _, seen, _ = on_rank(way, checked)
    return seen._replace(counted=counted or None)
