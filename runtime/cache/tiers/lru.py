"""Which entry goes first when room is needed: of those that nothing hangs below, the one used longest ago.

    a -- b -- c      c goes before b, and b before a, however old a is: without a, nobody reaches b and c
          `-- d

Plain bookkeeping: names, sizes and times. Not thread-safe: the tier that owns it has a lock.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from ..lru import Lru


@dataclass
class Record:
    """An entry in the books. used: time of last use, in nanoseconds, different for all."""

    size: int
    above: Hashable | None
    used: int


class LeafLru:
    """Entries by name, with ``total`` bytes."""

    def __init__(self) -> None:
        self.total = 0
        self._records: dict[Hashable, Record] = {}
        self._below: Counter = Counter()  # name -> how many entries hang below it, whether it is here or not
        self._leaves: Lru[Hashable] = Lru()
        self._latest = 0

    def __contains__(self, name: Hashable) -> bool:
        return name in self._records

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._records)

    def record(self, name: Hashable) -> Record | None:
        """What the books say of an entry; another object after each :meth:`add`."""
        return self._records.get(name)

    def add(self, name: Hashable, size: int, above: Hashable | None, used: int | None = None) -> None:
        """Enter an entry, in place of one of the same name. used: nanoseconds, None for now."""
        if name in self._records:
            self.remove(name)
        self._records[name] = Record(size, above, self._stamp(used))
        self.total += size
        if above is not None:
            self._below[above] += 1
            self._leaves.discard(above)
        self._offer(name)

    def touch(self, name: Hashable) -> None:
        """Note that an entry was used now; one that is not here is fine."""
        if name in self._records:
            self._records[name].used = self._stamp(None)
            self._offer(name)

    def remove(self, name: Hashable) -> None:
        """Strike an entry out; one that is not here is fine."""
        record = self._records.pop(name, None)
        if record is None:
            return
        self._leaves.discard(name)
        self.total -= record.size
        if record.above is None:
            return
        self._below[record.above] -= 1
        if not self._below[record.above]:
            del self._below[record.above]
            self._offer(record.above)

    def first_to_go(self) -> Hashable | None:
        """The leaf used longest ago; None when there is no entry."""
        if (name := self._leaves.first()) is not None:
            return name
        # files from elsewhere may claim to hang below each other in a circle
        return min(self._records, key=lambda name: self._records[name].used, default=None)

    def _offer(self, name: Hashable) -> None:
        """Enter a leaf, or its later use, among the leaves."""
        if name in self._records and name not in self._below:
            self._leaves.add(name, self._records[name].used)

    def _stamp(self, used: int | None) -> int:
        """A time that no other entry has: two of the same moment keep their order."""
        if used is None:
            used = max(time.time_ns(), self._latest + 1)
            self._latest = used
        return used
