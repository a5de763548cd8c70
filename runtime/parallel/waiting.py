"""A line now and then while this process waits for another: nobody should have to guess what a silence is.

WARNING ... waiting for rank 1 at 'settings' (10 s of 300 s)
WARNING ... waiting for rank 1 at 'settings' (20 s of 300 s)        then 40, 80, 160 s
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

FIRST_S = 10.0  # before the first line: ranks that start together come within a few seconds
GROWTH = 2.0


class Waiting:
    """A wait of at most ``patience_s`` seconds, which begins now and again with every :meth:`restart`."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.restart()

    def restart(self) -> None:
        """What is waited for showed a sign of life."""
        self._since, self._next_s = time.monotonic(), FIRST_S

    @property
    def over(self) -> bool:
        """Whether patience has run out."""
        return self.lasted_s > self.patience_s

    @property
    def lasted_s(self) -> float:
        """Seconds since the last sign of life."""
        return time.monotonic() - self._since

    def say(self, what: Callable[[], str]) -> None:
        """Log what is waited for when it is time to. what: asked only then."""
        if self.lasted_s >= self._next_s:
            self._next_s *= GROWTH
            log.warning("waiting for %s (%.0f s of %g s)", what(), self.lasted_s, self.patience_s)
