"""What the books ask to be written into the pools, in the order in which it must happen.

    admit with a hit      Copy(checkpoint -> private slot)
    checkpoint evicted    Poison(checkpoint)                  after the copy: the reader has its own state now
    advance               Copy(private slot -> checkpoint)
    release               Poison(private slot, pages)         after the copy again

An order may read what an earlier one wrote and overwrite what an earlier one read, so nothing is sorted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Copy(NamedTuple):
    """State and window of each source slot go to the target slot at the same place, all at once."""

    sources: list[int]
    targets: list[int]


class Clear(NamedTuple):
    """State and window of these slots become zero: a request starts there."""

    slots: list[int]


class Poison(NamedTuple):
    """These slots and pages become NaN: they are free, or not yet written (debugging only)."""

    slots: list[int]
    pages: list[int]


Order = Copy | Clear | Poison


class Fold(NamedTuple):
    """States move to the end of the verified rows they keep: (from slot, rows, to slot) of each, all at once.
    Nothing the books order; see speculate/settle.py.
    """

    moves: list[tuple[int, int, int]]


class PoisonAll(NamedTuple):
    """Everything becomes NaN: nothing is owned yet."""


Change = Order | Fold | PoisonAll  # of the pools, between two passes


class Orders:
    """The list of one step. Neighbours of one kind become one order where that means the same."""

    def __init__(self, poison: bool = False) -> None:
        self._poison = poison
        self._list: list[Order] = []

    def copy(self, source: int, target: int) -> None:
        """Copy a slot into another."""
        last = self._last(Copy)
        if last is None or source in last.targets or target in last.targets or target in last.sources:
            self._list.append(last := Copy([], []))
        last.sources.append(source)
        last.targets.append(target)

    def clear(self, slot: int) -> None:
        """Zero a slot."""
        if (last := self._last(Clear)) is None:
            self._list.append(last := Clear([]))
        last.slots.append(slot)

    def poison(self, slots: Sequence[int] = (), pages: Sequence[int] = ()) -> None:
        """Fill with NaN, under test."""
        if not self._poison or not (slots or pages):
            return
        if (last := self._last(Poison)) is None:
            self._list.append(last := Poison([], []))
        last.slots.extend(slots)
        last.pages.extend(pages)

    def take(self) -> list[Order]:
        """The list, which is empty afterwards."""
        taken, self._list = self._list, []
        return taken

    def _last(self, kind: type) -> Order | None:
        return self._list[-1] if self._list and isinstance(self._list[-1], kind) else None
