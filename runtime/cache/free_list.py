"""Numbered things that are free or have exactly one owner; number 0 is nobody's.

One kind holds latent pages, others KDA state slots: those of requests and, above them, those of the prefix
index. Number 0 is the null page or slot: padding and warm-up write there.
"""

from __future__ import annotations

from collections.abc import Iterable


class FreeList:
    """Numbers ``first`` to ``size - 1``, handed out last freed first. ``what`` names them in messages."""

    def __init__(self, size: int, what: str, first: int = 1) -> None:
        if size < 2:
            raise ValueError(f"need at least 2 {what}s (number 0 is reserved), got {size}")
        self.size = size
        self.first = first
        self.what = what
        self._free = list(range(size - 1, first - 1, -1))
        self._owner: list[object | None] = [None] * size

    def __len__(self) -> int:
        """How many are free."""
        return len(self._free)

    @property
    def used(self) -> int:
        """How many have an owner."""
        return self.size - self.first - len(self._free)

    def take(self, owner: object, count: int) -> list[int]:
        """``count`` numbers for ``owner``, who must know that so many are free."""
        assert 0 <= count <= len(self._free), f"{count} {self.what}s asked, {len(self._free)} free"
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        for number in taken:
            self._owner[number] = owner
        return taken

    def give(self, owner: object, numbers: Iterable[int]) -> None:
        """Take ``numbers`` back from ``owner``; anybody else's is our mistake."""
        for number in numbers:
            assert self._owner[number] is owner, f"{self.what} {number} does not belong to {owner!r}"
            self._owner[number] = None
            self._free.append(number)

    def owner(self, number: int) -> object | None:
        """Who has a number; None when it is free."""
        return self._owner[number]

    def move(self, owner: object, heir: object, numbers: Iterable[int]) -> None:
        """Give ``owner``'s numbers to ``heir``."""
        for number in numbers:
            assert self._owner[number] is owner, f"{self.what} {number} does not belong to {owner!r}"
            self._owner[number] = heir

    def check(self, held: dict[object, Iterable[int]]) -> None:
        """Walk every number: free once and ownerless, or in exactly the list of its owner.

        AssertionError if not.
        """
        seen: dict[int, object] = {}
        for number in self._free:
            assert self.first <= number < self.size, f"{self.what} {number} is free but does not exist"
            assert number not in seen, f"{self.what} {number} is free twice"
            assert self._owner[number] is None, f"{self.what} {number} is free but owned"
            seen[number] = None
        for owner, numbers in held.items():
            for number in numbers:
                assert self.first <= number < self.size, f"{owner!r} holds {self.what} {number}"
                assert number not in seen, f"{self.what} {number} of {owner!r} is free or held twice"
                assert self._owner[number] is owner, (
                    f"{self.what} {number} is held by {owner!r} but owned otherwise"
                )
                seen[number] = owner
        missing = self.size - self.first - len(seen)
        assert not missing, f"{missing} {self.what}s leaked"
