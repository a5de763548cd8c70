"""Run the application on uvicorn: bind early, say when we are ready, end in time.

    SIGTERM  no new requests, running answers get drain_s seconds, then the rest is aborted
    SIGHUP   the same, unless whoever started us has it ignored, as nohup does
    SIGINT   the same with no time given, during a drain too; a second one gives up on everything

The engine is told to stop at the signal itself, so that open streams end with an error event rather than
a cut connection, and a stream that hangs cannot hold the process. A step may outlast all patience: then
requests are told while it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from fastapi import FastAPI

from ..engine import Engine
from .server_config import ServerConfig

log = logging.getLogger(__name__)

LAST_BREATH_S = 1.0  # for the last events of aborted streams to be sent, and for the engine's last step
LAST_STEP_S = 0.3  # of it, for the engine to tell its requests between two steps


def bind(config: ServerConfig) -> socket.socket:
    """A bound socket, so that a busy port is known before the model is loaded. Raises ``ValueError``."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        hint = "; choose another with --port" if error.errno == errno.EADDRINUSE else ""
        why = f"{error.strerror or error}{hint}"
        raise ValueError(f"cannot listen on {config.host}:{config.port}: {why}") from None
    return listener


def url_of(listener: socket.socket) -> str:
    """The base URL clients use."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}/v1"


class Server(uvicorn.Server):
    """Uvicorn with our way to stop. ``on_ready`` is called once the port answers."""

    def __init__(self, app: FastAPI, engine: Engine, config: ServerConfig, on_ready: Callable[[], None]):
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=config.access_log,
                ws="none",
                server_header=False,
            )
        )
        self._service = app.state.service
        self._engine = engine
        self._drain_s = config.drain_s
        self._on_ready = on_ready
        self._stopping: list[threading.Thread] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Uvicorn's signals, and that of a terminal that has gone."""
        with super().capture_signals():
            here = threading.current_thread() is threading.main_thread()
            if not here or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
                yield
                return
            before = signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = len(self._stopping) > 1
        self.stop(0.0 if sig == signal.SIGINT else self._drain_s)

    def stop(self, drain_s: float) -> None:
        """Begin to stop; running answers get ``drain_s`` seconds. Safe to call from a signal handler.

        Called again it can only shorten the time: uvicorn has read the first one by then.
        """
        self._service.closing = True
        patience, first = drain_s + LAST_BREATH_S, self.config.timeout_graceful_shutdown
        self.config.timeout_graceful_shutdown = patience if first is None else min(first, patience)
        if self._stopping:
            later(patience, setattr, self, "force_exit", True)
        later(drain_s + LAST_STEP_S, self._engine.fail, "the server is stopping", "abort")
        self._stopping.append(threading.Thread(target=self._engine.stop, args=(drain_s,), daemon=True))
        self._stopping[-1].start()
        self.should_exit = True

    async def finish(self) -> bool:
        """Wait a moment for the engine; False when it is still in a step."""
        if not self._stopping:
            self.stop(0.0)
        deadline = asyncio.get_running_loop().time() + LAST_BREATH_S
        while any(t.is_alive() for t in self._stopping) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        return not any(t.is_alive() for t in self._stopping)


def later(seconds: float, call: Callable[..., object], *args: object) -> None:
    """Call from a thread that does not hold the process."""
    timer = threading.Timer(seconds, call, args)
    timer.daemon = True
    timer.start()


def serve(
    app: FastAPI, engine: Engine, listener: socket.socket, config: ServerConfig, on_ready: Callable[[], None]
) -> bool:
    """Start the engine, serve until a signal, stop both. False when the engine had to be left in a step."""

    async def run() -> bool:
        server = Server(app, engine, config, on_ready)
        await server.serve(sockets=[listener])
        return await server.finish()

    engine.start()
    ended = asyncio.run(run())
    if not ended:
        log.warning("the engine is still in a step")
    return ended
