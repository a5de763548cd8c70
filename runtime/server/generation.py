"""The engine requests behind one HTTP request: submitted together, read as they grow, never left behind.

event loop:     submit ----------------------------> updates() -> (index, Update) ...      close()
                  |                                     ^                                    |
engine thread:    +-> on_update -- call_soon_threadsafe +                        abort  <----+
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Protocol

from ..request import FinishReason, Request

if TYPE_CHECKING:
    from ..engine import OnUpdate, Update


class EngineLike(Protocol):
    """What the server needs of an engine; ``submit`` and ``abort`` may be called from any thread."""

    def submit(self, request: Request, on_update: OnUpdate) -> None: ...
    def abort(self, request_id: str, reason: FinishReason = "abort") -> None: ...
    @property
    def alive(self) -> bool: ...


class Generation:
    """Requests that live and end together. Use on the event loop; ``close`` when done, whatever happened."""

    def __init__(self, engine: EngineLike, requests: Sequence[Request]):
        self._engine = engine
        self._requests = list(requests)
        self._open: set[int] = set()
        self._queue: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    @property
    def over(self) -> bool:
        """Whether the engine takes no more requests."""
        return not self._engine.alive

    def submit(self) -> None:
        """Hand all requests over, or none: when the engine refuses one, the others are aborted again."""
        complete = False
        try:
            for index, request in enumerate(self._requests):
                self._engine.submit(request, self._listener(index))
                self._open.add(index)
            complete = True
        finally:
            if not complete:
                self.close()

    def _listener(self, index: int) -> OnUpdate:
        def on_update(update: Update) -> None:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, update))

        return on_update

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        """Updates with the place of their request, until every request has ended."""
        while self._open:
            index, update = await self._queue.get()
            if index not in self._open:
                continue
            if update.finish is not None:
                self._open.discard(index)
            yield index, update

    def stop(self, index: int, reason: FinishReason = "stop") -> None:
        """End one request early; its later updates are not seen any more."""
        if index in self._open:
            self._open.discard(index)
            self._engine.abort(self._requests[index].id, reason)

    def close(self) -> None:
        """End whatever still runs. Harmless when all is over."""
        for index in list(self._open):
            self.stop(index, "abort")
