"""Server-sent events, and noticing that nobody listens any more.

The web framework tells a plain handler nothing about a client that hung up, so both kinds of response race
their work against the disconnect; whoever loses is cancelled.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of ``work``, or None when the client hung up first; ``work`` is then cancelled."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnect(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def disconnect(receive: Receive) -> None:
    """Return when the client hung up. The request's body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A 200 whose body is one event for each item of ``events`` (JSON data, or text sent as it is).

    on_close is called exactly when no more events are wanted: at the end, on a fault, or at a disconnect.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[dict | str], on_close: Callable[[], None]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send(send))
        finally:
            self._on_close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": encode(event), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def encode(event: dict | str) -> bytes:
    """One event: ``data: ...`` and an empty line."""
    text = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()
