"""Rank 0's executor: lets every rank do what it is asked, itself last.

    engine -> Leader.run(..) --+-- broadcast ----> follow.py on every other rank: the same call there
                               +-- Executor.run(..)                  the same call here

One broadcast a pass. What is written between passes is written here at once and travels with the next pass:
nothing else reads the pools. Nothing that a follower does is decided there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from ..cache.orders import Change, Copy
from ..cache.writes import Pools
from ..executor import NO_COPIES, Executor, ForwardFn, GroupLost, Observe
from ..step import Step
from .breakage import UNKNOWN, broke_off, in_words
from .channel import Channel
from .hooks import Unwatched
from .wire import Ask, Command, Run, Stop, encode

if TYPE_CHECKING:
    from ..speculate.dspark_block import Block

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class Leader:
    """Does what ``executor`` does, on every rank that follows ``channel``; called as an Executor is.

    watch: told of every command. A call that fails here may have left the others in the middle of it: that
    one and all later ones raise :class:`GroupLost`, with a cause unless it is only that another rank is gone.
    What cannot be sent raises ValueError and nobody heard of it.
    """

    def __init__(self, executor: Executor, channel: Channel, watch: Unwatched | None = None) -> None:
        self.executor, self.channel = executor, channel
        self.watch = watch or Unwatched()
        self.steps = 0  # commands sent
        self.lost: str | None = None  # why nothing can be run any more
        self._changes: list[Change] = []  # not sent yet
        self._stopping = threading.Lock()

    @property
    def pools(self) -> Pools:
        """Rank 0's."""
        return self.executor.pools

    @property
    def forward(self) -> ForwardFn:
        """Rank 0's."""
        return self.executor.forward

    @property
    def exports(self) -> bool:
        """Whether the forward leaves checkpoints inside a row; on all ranks, or they refuse to run it."""
        return self.executor.exports

    def use(self, forward: ForwardFn) -> None:
        """Run ``forward`` from the next pass on, and the others theirs of the same number, which each must
        have been given by then.
        """
        self.executor.use(forward)

    def write(self, changes: Sequence[Change]) -> None:
        """Change the pools, on the other ranks before the next pass."""
        self.executor.write(changes)
        self._changes += changes

    def run(
        self, step: Step, logit_rows: Tensor, copies: Copy = NO_COPIES, observe: Observe | None = None
    ) -> Tensor | None:
        """One pass on every rank. Tensors on the CPU; where ``observe`` is given, the draft of every rank
        learns from it.
        """
        here = self.executor
        body = Run(step, logit_rows, copies, observe is not None, here.exports, here.number)
        return self._lead(body, lambda: here.run(step, logit_rows, copies, observe))

    def draft(self, anchors: Tensor, seen: Tensor, table: Tensor) -> Block:
        """One pass of the draft model on every rank. Tensors on the CPU."""
        return self._lead(Ask(anchors, seen, table), lambda: self.executor.draft(anchors, seen, table))

    def stop(self) -> None:
        """Let the others end; nothing can be run any more. A second call does nothing. Thread-safe, once
        nobody calls the rest.
        """
        with self._stopping:
            if self.lost is not None:
                return
            try:
                self._lead(Stop(), self.executor.stop)
            except GroupLost as error:
                log.warning("the other ranks could not be told to stop: %s", error)
            self.lost = self.lost or "the ranks were told to stop"

    def _lead(self, body: Run | Ask | Stop, here: Callable[[], Result]) -> Result:
        """Send a command and do this rank's part of it."""
        if self.lost is not None:
            raise GroupLost(self.lost)
        command = Command(self.steps + 1, self.watch.mark(), self._changes, body)
        numbers = encode(command)
        self.steps, self._changes = command.step, []
        try:
            with self.watch.step(command.kind, command.rows):
                self.channel.send(numbers)
                return here()
        except BaseException as error:
            known = self.watch.why(error) if isinstance(error, Exception) else None
            said = UNKNOWN if broke_off(in_words(error)) else in_words(error)
            self.lost = known or f"command {self.steps} ({command.kind}) failed on rank 0: {said}"
            if isinstance(error, Exception):
                raise GroupLost(self.lost) from (None if known else error)
            raise
