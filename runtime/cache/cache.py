"""Latent pages and KDA state slots, owned together: a request has both or neither.

    request A   slot 3   pages [7, 2, 9]     tokens 0 ..< 3 * page_size fit
    request B   slot 1   pages [4]
    nobody      slot 0   page 0              null: padding and warm-up write there

A page is written token by token, so what an earlier owner left in it is never read. A slot is summed into,
so it must be zero before its owner's first chunk: :meth:`Cache.take_writes` lists the slots to clear. No
torch here: the engine writes into the pools what this module says.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from ..request import Request
from .free_list import FreeList


class Holding(NamedTuple):
    """What a running request owns."""

    slot: int
    pages: array  # of int64 page ids, in token order; grows in place


class Writes(NamedTuple):
    """What must be written into the pools before the next forward, in this order."""

    poison_slots: list[int]  # NaN: freed since the last step (debugging only)
    poison_pages: list[int]
    clear_slots: list[int]  # zero: admitted since the last step


class Cache:
    """The books of ``num_pages`` pages of ``page_size`` tokens and ``num_slots`` slots, number 0 of each
    reserved.

    poison: also list what was freed, to be filled with NaN, so that a read of something freed cannot go
    unnoticed.
    """

    def __init__(self, num_pages: int, num_slots: int, page_size: int, *, poison: bool = False) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1 token, got {page_size}")
        self.page_size = page_size
        self.pages = FreeList(num_pages, "page")
        self.slots = FreeList(num_slots, "slot")
        self._held: dict[Request, Holding] = {}
        self._poison = poison
        self._writes = Writes([], [], [])

    @property
    def capacity(self) -> int:
        """Tokens that all pages together hold."""
        return (self.pages.size - 1) * self.page_size

    def pages_for(self, tokens: int) -> int:
        """Pages that ``tokens`` tokens take."""
        return -(-tokens // self.page_size)

    def holding(self, request: Request) -> Holding:
        """What an admitted request owns."""
        return self._held[request]

    def admit(self, request: Request, count: int, reserve: int = 0) -> bool:
        """Give a request a cleared slot and pages for its first ``count`` tokens, or nothing and return
        False.

        It gets in only when all its known tokens would fit beside ``reserve`` more pages: a prompt let in
        to be thrown out half-way does its work twice.
        """
        assert request not in self._held, f"{request!r} is admitted twice"
        assert request.seen == 0, f"{request!r} is admitted in the middle"
        if not self.slots or self.pages_for(len(request.tokens)) + reserve > len(self.pages):
            return False
        slot = self.slots.take(request, 1)[0]
        self._held[request] = Holding(slot, array("q", self.pages.take(request, self.pages_for(count))))
        self._writes.clear_slots.append(slot)
        return True

    def grow(self, request: Request, count: int) -> Holding | None:
        """Make room for tokens [seen, seen + count): what the request now holds, or None (and no change)."""
        holding = self._held[request]
        missing = -(-(request.seen + count) // self.page_size) - len(holding.pages)
        if missing > 0:
            if missing > len(self.pages):
                return None
            holding.pages.extend(self.pages.take(request, missing))
        return holding

    def release(self, request: Request) -> None:
        """Take everything back from a request; one that holds nothing is fine."""
        holding = self._held.pop(request, None)
        if holding is None:
            return
        self.pages.give(request, reversed(holding.pages))
        self.slots.give(request, [holding.slot])
        if holding.slot in self._writes.clear_slots:  # admitted and released between two steps
            self._writes.clear_slots.remove(holding.slot)
        if self._poison:
            self._writes.poison_slots.append(holding.slot)
            self._writes.poison_pages.extend(holding.pages)

    def take_writes(self) -> Writes:
        """What to write into the pools before the next forward; asked once a step."""
        writes, self._writes = self._writes, Writes([], [], [])
        return writes

    def check(self) -> None:
        """Walk every page and slot and hold them against the requests; AssertionError names what is wrong."""
        self.pages.check({request: holding.pages for request, holding in self._held.items()})
        self.slots.check({request: [holding.slot] for request, holding in self._held.items()})
        for request, holding in self._held.items():
            fits = len(holding.pages) * self.page_size
            assert request.seen <= fits, f"{request!r} has seen more than its {len(holding.pages)} pages hold"
