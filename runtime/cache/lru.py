"""Things in the order in which they were used last; all steps take logarithmic time."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

T = TypeVar("T")


class Lru(Generic[T]):
    """A set that knows its oldest member. Stale entries stay in the heap until they come up or outnumber."""

    def __init__(self) -> None:
        self._stamps: dict[T, int] = {}
        self._heap: list[tuple[int, int, T]] = []
        self._pushed = 0  # breaks ties, so that members are never compared

    def __len__(self) -> int:
        return len(self._stamps)

    def __contains__(self, item: T) -> bool:
        return item in self._stamps

    def add(self, item: T, stamp: int) -> None:
        """Put an item in, or move it to another place. A larger stamp is a later use."""
        if self._stamps.get(item) == stamp:
            return
        self._stamps[item] = stamp
        self._pushed += 1
        heapq.heappush(self._heap, (stamp, self._pushed, item))
        if len(self._heap) > 2 * len(self._stamps) + 64:
            self._heap = [e for e in self._heap if self._stamps.get(e[2]) == e[0]]
            heapq.heapify(self._heap)

    def discard(self, item: T) -> None:
        """Take an item out, if it is in."""
        self._stamps.pop(item, None)

    def oldest(self) -> int | None:
        """The stamp of the oldest; None when there is none."""
        item = self.first()
        return None if item is None else self._stamps[item]

    def first(self) -> T | None:
        """The oldest, which stays in; None when there is none."""
        while self._heap:
            stamp, _, item = self._heap[0]
            if self._stamps.get(item) == stamp:
                return item
            heapq.heappop(self._heap)
        return None

    def pop(self) -> T | None:
        """Take the oldest out; None when there is none."""
        item = self.first()
        if item is not None:
            heapq.heappop(self._heap)
            del self._stamps[item]
        return item
