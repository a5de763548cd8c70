"""What an engine counts: numbers of this moment, totals since the start, and how long things took.

The engine thread writes, any thread may take a snapshot. Times are in seconds. The server turns a snapshot
into metrics; here is no metrics library.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cache.tiers.tally import OffloadStats

if TYPE_CHECKING:
    pass

FIRST_TOKEN_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
BETWEEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
WHOLE_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


@dataclass(frozen=True)
class HistogramData:
    """counts[i] values were at most bounds[i] and above the bound before; the last count is above all
    bounds.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


class Histogram:
    """Counts of values between fixed bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count ``value`` so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def snapshot(self) -> HistogramData:
        """The counts so far."""
        return HistogramData(self._bounds, tuple(self._counts), self._sum)


@dataclass(frozen=True)
class EngineStats:
    """A snapshot. ``rows`` are token rows run through the model, replays of preempted requests among them;
    ``prompt_tokens`` and ``output_tokens`` are what clients asked and got, each counted once.

    prefix_query_tokens: prompt tokens that were looked up, once a request; prefix_hit_tokens: those of them
    that were not run. prefix_declines: why a prefix was not kept or not served, and how often. The drafts are
    counted by position: how many were verified there, and how many of those were accepted.
    """

    running: int
    waiting: int
    pages_used: int
    pages_total: int
    slots_used: int
    slots_total: int
    steps: int
    rows: int
    prompt_tokens: int
    output_tokens: int
    preemptions: int
    finished: Mapping[str, int]  # by reason
    failed_steps: int
    last_error: str | None
    current_step_s: float  # how long the step now running has taken, 0 between steps
    time_to_first_token: HistogramData
    time_between_tokens: HistogramData
    time_of_request: HistogramData
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    evicted_pages: int = 0
    evicted_states: int = 0
    prefix_declines: Mapping[str, int] = field(default_factory=dict)
    drafts_proposed: tuple[int, ...] = ()
    drafts_accepted: tuple[int, ...] = ()
    offload: OffloadStats | None = None  # of the tiers below the pools, where there are any

    @property
    def accepted_length(self) -> float:
        """Tokens a verified row gave on average: the accepted drafts and one more. 0 before the first."""
        rows = self.drafts_proposed[0] if self.drafts_proposed else 0
        return 1 + sum(self.drafts_accepted) / rows if rows else 0.0


@dataclass
class Counters:
    """Totals the engine keeps; see :class:`EngineStats`."""

    steps: int = 0
    rows: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finished: Counter = field(default_factory=Counter)
    failed_steps: int = 0
    last_error: str | None = None
    step_started: float | None = None
    drafts_proposed: list[int] = field(default_factory=list)
    drafts_accepted: list[int] = field(default_factory=list)
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS))
    time_between_tokens: Histogram = field(default_factory=lambda: Histogram(BETWEEN_BOUNDS))
    time_of_request: Histogram = field(default_factory=lambda: Histogram(WHOLE_BOUNDS))

    def count_drafts(self, proposed: int, accepted: int) -> None:
        """Count one verified row: ``proposed`` drafts, of which the first ``accepted`` were accepted."""
        longer = proposed - len(self.drafts_proposed)
        for counts, reached in ((self.drafts_proposed, proposed), (self.drafts_accepted, accepted)):
            counts.extend([0] * longer)
            for position in range(reached):
                counts[position] += 1
