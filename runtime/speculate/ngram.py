"""Drafts without a model: what followed the last time the same words were said.

    tokens     ... the cat sat on the mat . the cat
                       ------- suffix, longest first -------
    found          the cat
    draft                  sat on the mat . the cat sat ...      reads on into itself, like LZ77

Per request and per n the index maps the hash of each n tokens to the place after their most recent
occurrence. A new token costs one entry per n; nothing is searched. A hash is confirmed by comparing the
tokens, so a collision costs a draft and never more. About 110 bytes an entry.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor

from ..request import Request
from .draft import Draft

if TYPE_CHECKING:
    from ..cache.holding import Holding
    from ..step import Step

BASE = 0x9E3779B97F4A7C15  # odd, so no token is lost in the multiplication
MASK = (1 << 64) - 1
BULK = 256  # from so many new tokens on numpy is faster than a loop
CATCH_UP = 1 << 13  # tokens indexed in one call: some milliseconds of a step


class Index:
    """Where each run of ``shortest`` to ``longest`` tokens was last followed by something."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.sizes = range(longest, shortest - 1, -1)
        self.indexed = 0  # tokens whose n-grams, ending before them, are in
        self._places: dict[int, dict[int, int]] = {n: {} for n in self.sizes}

    def extend(self, tokens: array, end: int) -> None:
        """Put in every n-gram that is followed by one of ``tokens[:end]``."""
        start, self.indexed = self.indexed, max(end, self.indexed)
        if end - start >= BULK:
            self._extend_many(tokens, start, end)
            return
        for place in range(start, end):
            for n, key in self._suffixes(tokens, place):
                self._places[n][key] = place

    def find(self, tokens: array) -> int:
        """The place after the most recent earlier occurrence of the longest suffix that has one; 0: none."""
        assert self.indexed == len(tokens), "tokens are missing in the index"
        end = len(tokens)
        for n, key in reversed(list(self._suffixes(tokens, end))):
            place = self._places[n].get(key)
            if place is not None and tokens[place - n : place] == tokens[end - n : end]:
                return place
        return 0

    def _suffixes(self, tokens: array, end: int) -> list[tuple[int, int]]:
        """(n, hash) of the n tokens before ``end``, shortest first."""
        shortest, key, factor, found = self.sizes[-1], 0, 1, []
        for n in range(1, min(self.sizes[0], end) + 1):
            key = (key + tokens[end - n] * factor) & MASK
            factor = factor * BASE & MASK
            if n >= shortest:
                found.append((n, key))
        return found

    def _extend_many(self, tokens: array, start: int, end: int) -> None:
        longest = self.sizes[0]
        first = max(start - longest, 0)
        ids = np.frombuffer(tokens, dtype=np.int64)[first : end - 1].astype(np.uint64)
        keys, factor = np.zeros(len(ids), dtype=np.uint64), 1
        for n in range(1, min(longest, len(ids)) + 1):  # keys[i]: of the n tokens that end with ids[i]
            keys[n - 1 :] += ids[: len(ids) - n + 1] * np.uint64(factor)
            factor = factor * BASE & MASK
            if n in self._places:
                skip = max(start - 1 - first, n - 1)
                places = range(first + skip + 1, end)
                self._places[n].update(zip(keys[skip:].tolist(), places))


class NgramDrafter:
    """Proposes ``num_drafts`` tokens where the last ``longest`` to ``shortest`` tokens occurred before.

    The default when a model has no draft of its own. Drafts are one-hot; their confidence is what
    :mod:`.adaptive` learns of the request. Raises ValueError for sizes that leave nothing to look for.
    """

    lookahead = 0
    taps: tuple[int, ...] = ()

    def __init__(self, num_drafts: int, longest: int = 4, shortest: int = 1) -> None:
        if num_drafts < 1:
            raise ValueError(f"num_drafts must be at least 1 to draft at all, got {num_drafts}")
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-gram sizes must be 1 <= shortest <= longest, got {shortest} and {longest}")
        self.num_drafts = num_drafts
        self._sizes = (shortest, longest)
        self._indices: WeakKeyDictionary[Request, Index] = WeakKeyDictionary()

    def observe(self, step: Step, taps: Tensor) -> None:
        """A forward teaches nothing: the tokens themselves are looked at."""

    def propose(self, requests: Sequence[Request], holdings: Sequence[Holding]) -> list[Draft | None]:
        """A draft where a suffix was found, none elsewhere and while a long prompt is not yet indexed."""
        return [self._propose(request) for request in requests]

    def forget(self, request: Request) -> None:
        """Drop the request's index."""
        self._indices.pop(request, None)

    def _propose(self, request: Request) -> Draft | None:
        tokens = request.tokens
        index = self._indices.get(request)
        if index is None:
            index = self._indices[request] = Index(*self._sizes)
        index.extend(tokens, min(len(tokens), index.indexed + CATCH_UP))
        count = min(self.num_drafts, request.room - 1)  # the last token is not a draft's to give
        if index.indexed < len(tokens) or count < 1:
            return None
        place = index.find(tokens)
        return Draft(copied(tokens, place, count)) if place else None


def copied(tokens: array, place: int, count: int) -> list[int]:
    """``count`` tokens read from ``place`` on, past the end from what was just read."""
    drafts = tokens[place : place + count].tolist()
    known = len(drafts)
    while len(drafts) < count:
        drafts.append(drafts[len(drafts) - known])
    return drafts
