"""Starting and stopping on a real socket; signals are sent to a process of our own in the CLI's test."""

import json
import signal
import socket
import threading
import time

import httpx
import pytest
from fake_engine import FakeEngine
from k3compile.runtime.server import body
from k3compile.runtime.server.run import bind, url_of
from k3compile.runtime.server.server_config import ServerConfig
from serving import LiveServer, says, wait_until


def test_a_busy_port_is_told_before_anything_is_loaded():
    listener = bind(ServerConfig(port=0))
    listener.listen()
    port = listener.getsockname()[1]
    with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
        bind(ServerConfig(port=port))
    listener.close()


def test_a_host_that_is_not_ours_is_told():
    with pytest.raises(ValueError, match=r"cannot listen on 203\.0\.113\.7:8000"):
        bind(ServerConfig(host="203.0.113.7"))


@pytest.mark.parametrize(
    ("host", "url"), [("127.0.0.1", "http://127.0.0.1:"), ("0.0.0.0", "http://127.0.0.1:")]
)
def test_the_url_is_one_that_clients_can_use(host, url):
    listener = bind(ServerConfig(host=host, port=0))
    assert url_of(listener) == f"{url}{listener.getsockname()[1]}/v1"
    listener.close()


def talk(live, texts, errors):
    asked = {"prompt": "x", "stream": True, "max_tokens": 100}
    with httpx.stream("POST", live.url + "/completions", json=asked, timeout=30) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                texts.append(event["choices"][0]["text"]) if "choices" in event else errors.append(
                    event["error"]
                )


class Draining(FakeEngine):
    """Gives running requests their time when told to stop, as the real engine does."""

    def stop(self, drain_s=0.0):
        self.alive = False
        deadline = time.monotonic() + drain_s
        while self.live and time.monotonic() < deadline:
            time.sleep(0.005)
        super().stop()


@pytest.mark.parametrize(("sig", "finishes"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
def test_sigterm_lets_a_stream_finish_and_sigint_ends_it_with_an_error_event(sig, finishes):
    engine = Draining(says("a" * 200), pause_s=0.01)
    texts, errors = [], []
    with LiveServer(engine, drain_s=20) as live:
        client = threading.Thread(target=talk, args=(live, texts, errors))
        client.start()
        wait_until(lambda: len(texts) > 3)
        start = time.monotonic()
        live.server.handle_exit(sig, None)
        assert live.app.state.service.health() == "the server is stopping"
        client.join(20)
        assert not client.is_alive()
        wait_until(lambda: closed(live.url))
    assert time.monotonic() - start < 5
    assert ("".join(texts) == "a" * 100) == finishes
    assert bool(errors) != finishes
    assert finishes or errors[0]["message"] == "the server is stopping"


@pytest.mark.parametrize(
    ("first", "second", "pause"), [(signal.SIGTERM, signal.SIGINT, 0.3), (signal.SIGINT, signal.SIGTERM, 0.0)]
)
def test_sigint_ends_a_drain_that_a_half_sent_body_holds_open(first, second, pause):
    with LiveServer(FakeEngine(says("a")), drain_s=60) as live:
        host, port = live.url.split("//")[1].split("/")[0].split(":")
        with socket.create_connection((host, int(port))) as half:
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
            time.sleep(0.1)
            start = time.monotonic()
            live.server.handle_exit(first, None)
            time.sleep(pause)
            live.server.handle_exit(second, None)
            wait_until(lambda: not live._thread.is_alive())
            assert time.monotonic() - start < 5


def test_a_client_that_stops_writing_is_told_and_let_go(monkeypatch):
    monkeypatch.setattr(body, "PATIENCE_S", 0.3)
    with LiveServer(FakeEngine(says("a"))) as live:
        host, port = live.url.split("//")[1].split("/")[0].split(":")
        with socket.create_connection((host, int(port)), timeout=10) as half:
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
            answer = b"".join(iter(lambda: half.recv(4096), b""))  # to the end of the connection
        head, _, said = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert (
            json.loads(said)["error"]["message"] == "the body did not go on for 0.3 s: send the whole of it"
        )
        ok = httpx.post(live.url + "/completions", json={"prompt": "x", "max_tokens": 2}, timeout=30)
        assert ok.status_code == 200


def closed(url):
    host, port = url.split("//")[1].split("/")[0].split(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return True
    return False


def test_a_stream_that_hangs_does_not_hold_the_process():
    engine = FakeEngine(says("a"), manual=True)
    engine.stop = lambda drain_s=0.0: time.sleep(60)  # an engine deep in a step, which tells nobody
    with LiveServer(engine) as live:
        texts = []
        client = threading.Thread(target=lambda: swallow(live, texts), daemon=True)
        client.start()
        wait_until(lambda: engine.live)
        start = time.monotonic()
        live.server.handle_exit(signal.SIGINT, None)
        wait_until(lambda: not live._thread.is_alive())
        assert time.monotonic() - start < 4


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_clients_hear_why_while_a_step_outlasts_all_patience(sig, caplog):
    engine = FakeEngine(says("a"), manual=True)
    engine.stop = lambda drain_s=0.0: time.sleep(60)
    with LiveServer(engine, drain_s=0.2) as live:
        errors, answers = [], []
        asked = {"prompt": "x", "max_tokens": 9}
        clients = [
            threading.Thread(target=talk, args=(live, [], errors)),
            threading.Thread(
                target=lambda: answers.append(httpx.post(live.url + "/completions", json=asked, timeout=30))
            ),
        ]
        for client in clients:
            client.start()
        wait_until(lambda: len(engine.live) == 2)
        live.server.handle_exit(sig, None)
        for client in clients:
            client.join(5)
            assert not client.is_alive()
        assert [error["message"] for error in errors] == ["the server is stopping"]
        assert answers[0].status_code == 503
        assert answers[0].json()["error"]["message"] == "the server is stopping"
    assert "Traceback" not in caplog.text


def swallow(live, texts):
    try:
        talk(live, texts, [])
    except httpx.HTTPError as error:
        texts.append(error)
