"""How long a step may take, learnt from those before it; and how long something has lasted while we looked.

    allowed = max(deadline, SLACK x rows x the least seconds a row that a step has taken)

A rank that is stuck shows in seconds, and a prompt of thousands of rows on a CPU honestly takes longer: what
one row took at best is a fair measure of a large step. Until one was seen it is what a small step took a row,
which is too much.

A rank's silence is counted in rounds: times at which the store answered us and had nothing new of that rank.
A store that stands still for ten seconds makes nobody silent.
"""

from __future__ import annotations

SLACK = 4.0
GAP_S = 1.0  # a look that comes later than this was not late by the fault of those we look at


class Allowance:
    """The deadline of a step. deadline_s: of any."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._row_s: float | None = None

    def of(self, rows: int) -> float:
        """Seconds for a step of so many token rows; 0 where they are not known."""
        return max(self.deadline_s, SLACK * rows * (self._row_s or 0.0))

    def learn(self, rows: int, seconds: float) -> None:
        """A step has ended well."""
        if rows > 0:
            least = seconds / rows
            self._row_s = least if self._row_s is None else min(self._row_s, least)


class Stopwatch:
    """Counts how long ``what`` has stayed the same, in looks. If this process stood still for a minute, that
    minute is no one's silence: a gap between two looks counts a second at most.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._what: object = None
        self._at: float | None = None

    def look(self, what: object, now: float) -> float:
        """Seconds for which ``what`` is the same. now: of a monotonic clock."""
        gap = 0.0 if self._at is None else min(now - self._at, GAP_S)
        self.seconds = self.seconds + gap if what == self._what else 0.0
        self._what, self._at = what, now
        return self.seconds


class Silence:
    """How long another rank has not been heard, over rounds in which the store did answer.

    After a round that hung the rank gets a fresh start, as it could not write meanwhile either: once, until
    it is heard again, so that a rank which stands still is found through a slow store too.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._heard: object = None
        self._rounds: int | None = None
        self._at = 0.0
        self._excused = False

    def look(self, heard: object, rounds: int, now: float) -> float:
        """Seconds for which ``heard`` is the same. rounds: of ours that have ended; now: of a monotonic
        clock.
        """
        if rounds == self._rounds:
            return self.seconds
        gap = 0.0 if self._rounds is None else now - self._at
        hung = gap > GAP_S
        if heard != self._heard or (hung and not self._excused):
            self.seconds, self._excused = 0.0, hung and heard == self._heard
        else:
            self.seconds += min(gap, GAP_S)
        self._heard, self._rounds, self._at = heard, rounds, now
        return self.seconds
