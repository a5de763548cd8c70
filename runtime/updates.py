"""What a request's owner is told, and the record of a request inside the engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from .executor import GroupLost
from .request import FinishReason, Request
from .sampler import TokenLogprobs

log = logging.getLogger(__name__)


class QueueFull(RuntimeError):
    """Too many requests wait; try again later."""


class EngineClosed(RuntimeError):
    """The engine is stopping or has died; it takes no more requests."""


@dataclass(frozen=True)
class Update:
    """What a request got in one step. ``finish`` is set in its last one. Counts are totals so far.

    error: why it failed, with finish "error". cached_tokens: prompt tokens that were not run again.
    """

    request_id: str
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    finish: FinishReason | None
    error: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


OnUpdate = Callable[[Update], None]


@dataclass
class Live:
    """A request in the engine and whom to tell. Times are monotonic seconds."""

    request: Request
    on_update: OnUpdate
    last_token: float | None = None
    ended: bool = False  # it was told a finish
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def tell(
        self,
        tokens: list[int],
        logprobs: list[TokenLogprobs] | None,
        finish: FinishReason | None,
        error: str | None,
    ) -> bool:
        """Call the listener, unless it was told a finish before; False when it failed. Thread-safe."""
        r = self.request
        counts = (r.prompt_tokens, r.output_tokens, r.cached_tokens)
        with self._lock:
            if self.ended:
                return True
            self.ended = finish is not None
            try:
                self.on_update(Update(r.id, tokens, logprobs, finish, error, *counts))
            except Exception:  # a listener's fault must not end the service of the others
                log.exception("on_update of request %s failed; the request is dropped", r.id)
                return False
        return True


class Goodbye(NamedTuple):
    """A request that is to end, and how that is counted."""

    id: str
    reason: FinishReason


def last_words(error: BaseException) -> str:
    """Log what ended an engine, and say it for those who wait. That other ranks are gone is no fault of the
    code that noticed, and comes without the way there.
    """
    if isinstance(error, GroupLost):
        log.error("the engine has lost its ranks: %s", error, exc_info=error.__cause__)
        return str(error)
    log.exception("the engine died")
    return f"the engine died: {type(error).__name__}: {error}"
