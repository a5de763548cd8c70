"""A store that is not there is told, while it is waited for and at the end; so is one that is none."""

import socket
import threading
import time

import pytest
from k3compile.runtime.parallel import store, waiting
from k3compile.runtime.parallel.store import NoStore, connect


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(waiting, "FIRST_S", 0.2)
    monkeypatch.setattr(store, "POLL_S", 0.05)


def test_a_store_that_comes_late_is_found(port, monkeypatch):
    """Torch's own client, which would wait without a word, is not asked before somebody listens."""
    kept, asked, attempt = [], [], store.attempt

    def noted(host, port, keeps, patience_s):
        with socket.socket() as probe:
            asked.append((keeps, probe.connect_ex((host, port)) == 0))
        return attempt(host, port, keeps, patience_s)

    monkeypatch.setattr(store, "attempt", noted)
    keeper = threading.Timer(0.5, lambda: kept.append(connect("127.0.0.1", port, True, 20.0)))
    keeper.start()
    found = connect("127.0.0.1", port, False, 20.0)
    keeper.join(20)
    kept[0].set("a", "1")
    assert found.get("a") == b"1"
    assert asked == [(True, False), (False, True)]


def test_nobody_who_listens_is_told(port, caplog):
    with pytest.raises(NoStore, match=f"no store at 127.0.0.1:{port}, .* Connection refused; see whether ra"):
        connect("127.0.0.1", port, False, 0.6)
    assert f"waiting for the store at 127.0.0.1:{port}, which rank 0" in caplog.messages[0]
    assert "Connection refused" in caplog.messages[0]


@pytest.mark.parametrize("keeps", [True, False])
def test_an_unknown_host_is_told(keeps, monkeypatch, caplog, capfd):
    def unknown(*of, **more):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(store.socket, "getaddrinfo", unknown)
    with pytest.raises(NoStore, match=r"no store at no\.such\.host:29500, .* Name or service not known"):
        connect("no.such.host", 29500, keeps, 0.5)
    assert "Name or service not known" in caplog.messages[0]
    assert "c10d" not in capfd.readouterr().err


def test_a_listener_that_is_no_store_is_told_and_does_not_hold_the_process(caplog):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        start = time.monotonic()
        with pytest.raises(
            NoStore, match=r"nothing there has answered as one in 1 s; .* another MASTER_PORT"
        ):
            connect("127.0.0.1", other.getsockname()[1], False, 1.0)
        assert time.monotonic() - start < 10
        assert "nothing there answers as one" in caplog.messages[0]


def test_who_keeps_it_is_told_that_the_port_is_taken():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(
            NoStore, match=r"cannot keep the store at .*; is another process RANK 0, or another"
        ):
            connect("127.0.0.1", other.getsockname()[1], True, 5.0)
