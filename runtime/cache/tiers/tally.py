"""Counts of what was stored, loaded and declined, by reason: a decline is otherwise only a lower hit rate."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from .entry import Declined

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OffloadStats:
    """A snapshot. Totals are since the start; stored and loaded count entries, by tier.

    store_declined, load_declined: by reason. loads: prefixes that were asked for, by outcome ("done",
    "failed", "cancelled"). loaded_tokens: tokens of the prefixes that were done.
    """

    host_bytes: int
    host_entries: int
    disk_bytes: int
    disk_entries: int
    queued: int
    loading: int
    stored: Mapping[str, int]
    loaded: Mapping[str, int]
    loads: Mapping[str, int]
    loaded_tokens: int
    store_declined: Mapping[str, int]
    load_declined: Mapping[str, int]


class Tally:
    """Counters that several threads add to. The first decline of each reason is logged, the others only
    counted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, what: str, name: str, count: int = 1) -> None:
        """Count under two names."""
        with self._lock:
            self._counts[what, name] += count

    def decline(self, what: str, error: Declined) -> None:
        """Count a decline by its reason; what: "store" or "load"."""
        name = f"{what}_declined"
        with self._lock:
            self._counts[name, error.reason] += 1
            first = self._counts[name, error.reason] == 1
        if first:
            log.warning("offload: a %s was declined (further ones are only counted): %s", what, error)

    def of(self, what: str) -> dict[str, int]:
        """All counts under a name."""
        with self._lock:
            return {name: count for (kind, name), count in self._counts.items() if kind == what}
