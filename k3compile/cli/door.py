"""The way in for clients: what the verb was asked, the port, and the server until a signal ends it."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from .. import __version__
from ..runtime.parallel.watch_config import WatchConfig
from ..runtime.server.server_config import ServerConfig
from ..serving import Serving

if TYPE_CHECKING:
    import socket

    from ..runtime.engine import Engine
    from ..runtime.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Asked(NamedTuple):
    """What to serve, as this process was told, checked as far as it can be before anything is loaded.

    device: cpu or cuda. patience: of several ranks with each other.
    """

    checkpoint: Path
    serving: Serving
    server: ServerConfig
    dtype: str
    resident: str | None
    compiled: bool
    device: str = "cpu"
    patience: WatchConfig = WatchConfig()


def open_door(asked: Asked) -> socket.socket:
    """Take the port, which answers nobody yet, and say what will be served. Raises ValueError if taken."""
    from ..runtime.server.run import bind

    server = asked.server
    if server.api_key is None and not server.is_loopback:
        log.warning("listening on %s without an API key: whoever reaches it may use it", server.host)
    listener = bind(server)
    for line in asked.serving.lines():
        log.info("%s", line)
    for line in asked.serving.warnings:
        log.warning("%s", line)
    return listener


def answer(asked: Asked, engine: Engine, tokenizer: Tokenizer, listener: socket.socket) -> bool:
    """Serve until SIGINT, SIGTERM or SIGHUP. False when the engine had to be left in a step."""
    from ..runtime.server.app import build_app
    from ..runtime.server.run import serve, url_of

    name = asked.server.model_name

    def announce() -> None:
        say(f"k3compile {__version__} serves {name!r} at {url_of(listener)} (Ctrl-C ends it)")

    app = build_app(engine, tokenizer, asked.server, __version__)
    return serve(app, engine, listener, asked.server, announce)


def say(line: str) -> None:
    """A line on standard output, which nobody may read any more: a server goes on without."""
    try:
        print(line, flush=True)
    except OSError as error:
        log.warning("standard output is gone (%s); it would have said: %s", error.strerror, line)
        nowhere = os.open(os.devnull, os.O_WRONLY)  # or what is still buffered fails once more at the end
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def leave(code: int = 0) -> NoReturn:
    """End the process here: a thread may be deep in a step or a compiler, which nothing can stop, and the
    interpreter's own way out waits seconds for the compiler's workers. They end when we do.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
