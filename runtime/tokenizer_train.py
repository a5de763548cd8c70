"""Learn a small byte-level BPE, so that a checkpoint can be made without a hub.

    ranks 0..255      the single bytes
    rank 256, 257...  the most frequent join of two neighbours in the corpus, then the next one, ...

Equal counts go to the smaller bytes, so the same corpus gives the same file on every machine. Joins are
counted by the bytes they make, not by where they are cut, because the encoder too looks only at the bytes.
"""

from __future__ import annotations

import base64
from collections import Counter, defaultdict
from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import pairwise

import regex

from .tokenizer import PRE_SPLIT
from .tokenizer_corpus import CORPUS


def train_bpe(texts: Iterable[str] | None, num_ranks: int) -> bytes:
    """Bytes of a ``tiktoken.model`` with ``num_ranks`` ranks learned on ``texts`` (None: our own corpus).

    Raises ``ValueError`` when ``num_ranks`` is below 256 or the texts are too short for so many merges.
    """
    if num_ranks < 256:
        raise ValueError(f"num_ranks is {num_ranks}; the 256 single bytes come first, so at least 256")
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += _learn_merges(_count_words(CORPUS if texts is None else texts), num_ranks - 256)
    if len(tokens) < num_ranks:
        raise ValueError(
            f"the texts support {len(tokens)} ranks, not {num_ranks}: give more text or ask for fewer"
        )
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    return b"".join(lines)


def _count_words(texts: Iterable[str]) -> Counter[bytes]:
    """How often each pre-split piece occurs."""
    split = regex.compile(PRE_SPLIT, regex.V1)
    return Counter(piece.encode() for text in texts for piece in split.findall(text))


def _learn_merges(words: Counter[bytes], wanted: int) -> list[bytes]:
    """Up to ``wanted`` joins, best first."""
    table = _Joins(words)
    rank: dict[bytes, int] = {}
    while len(rank) < wanted and (join := table.pop_best()) is not None:
        rank[join] = len(rank)
        for word in sorted(table.holders.pop(join)):
            table.count(word, -1)
            table.parts[word] = _merge(table.parts[word], rank)
            table.count(word, +1)
    return list(rank)


class _Joins:
    """How often each join of two neighbours occurs, and in which words."""

    def __init__(self, words: Counter[bytes]):
        self.words = words
        self.parts: dict[bytes, tuple[bytes, ...]] = {}
        self.counts: Counter[bytes] = Counter()
        self.holders: defaultdict[bytes, set[bytes]] = defaultdict(set)
        self.heap: list[tuple[int, bytes]] = []  # holds stale counts too; pop_best skips them
        for word in words:
            self.parts[word] = tuple(bytes([byte]) for byte in word)
            self.count(word, +1)

    def count(self, word: bytes, sign: int) -> None:
        """Add or take away the joins of one word."""
        parts = self.parts[word]
        for left, right in pairwise(parts):
            join = left + right
            self.counts[join] += sign * self.words[word]
            self.holders[join].add(word)
            heappush(self.heap, (-self.counts[join], join))

    def pop_best(self) -> bytes | None:
        """The most frequent join (the smaller bytes among equals), or None when all words are whole."""
        while self.heap:
            negative, join = heappop(self.heap)
            if negative < 0 and self.counts[join] == -negative:
                return join
        return None


def _merge(parts: tuple[bytes, ...], rank: dict[bytes, int]) -> tuple[bytes, ...]:
    """Join neighbours, lowest rank first, until none is known: what the encoder will do."""
    while True:
        known = [
            (rank[left + right], at)
            for at, (left, right) in enumerate(pairwise(parts))
            if left + right in rank
        ]
        if not known:
            return parts
        at = min(known)[1]
        parts = (*parts[:at], parts[at] + parts[at + 1], *parts[at + 2 :])
