"""What the endpoints share: the engine, the tokenizer, the settings, and whether we are still open."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from ..engine import EngineClosed, QueueFull
from ..request import Request
from ..stats import EngineStats
from ..tokenizer import Tokenizer
from .errors import ApiError
from .generation import EngineLike, Generation
from .server_config import ServerConfig


class ServedEngine(EngineLike, Protocol):
    """The engine as the server sees it; every method may be called from any thread."""

    vocab_size: int
    max_model_len: int

    def stats(self) -> EngineStats: ...


class Service:
    """One model behind HTTP. ``closing``: running answers go on, new requests get 503."""

    def __init__(self, engine: ServedEngine, tokenizer: Tokenizer, config: ServerConfig):
        self.engine = engine
        self.tokenizer = tokenizer
        self.config = config
        self.created = int(time.time())
        self.closing = False

    def check_model(self, name: str | None) -> None:
        """A request may leave the model out; another one than ours is 404."""
        if name is not None and name != self.config.model_name:
            raise ApiError(
                404,
                f"the model {name[:200]!r} does not exist, this server has {self.config.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def check_open(self) -> None:
        if self.closing or not self.engine.alive:
            why = self.health() or "the server is stopping"
            raise ApiError(503, why, retry_after_s=self.config.retry_after_s)

    def generate(self, requests: Sequence[Request]) -> Generation:
        """Submit requests together. Raises :class:`ApiError` 429 when the queue is full, 503 when closed,
        and ``ValueError`` for a request that the engine can never run.
        """
        self.check_open()
        generation = Generation(self.engine, requests)
        try:
            generation.submit()
        except QueueFull as error:
            raise ApiError(
                429, f"too busy: {error}", code="queue_full", retry_after_s=self.config.retry_after_s
            ) from None
        except EngineClosed as error:
            raise ApiError(503, str(error), retry_after_s=self.config.retry_after_s) from None
        return generation

    def health(self) -> str | None:
        """Why we cannot serve, or None."""
        if self.closing:
            return "the server is stopping"
        stats = self.engine.stats()
        if not self.engine.alive:
            return stats.last_error or "the engine has stopped"
        if stats.current_step_s > self.config.stall_s:
            return f"a step has been running for {stats.current_step_s:.0f} s"
        return None
