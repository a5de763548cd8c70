"""Twelve requests that meet every edge of page, unit and block, served with any set of features.

    page 16   unit 32   block 64   step 160 rows   4 at once   3 drafts
    request  0 .. 5   lengths around the edges, prefixes shared in part
    request  6        the first one resent, when all that could push it out has run
    request  7        the first one's next turn: its prompt, its answer, and more
    request  8 .. 11  one token more than a unit, the first one again under a salt of its own (STRANGER), a
                      prompt longer than a step, a resent one that goes on

Plain data and the drafter that knows the answers; features_server.py serves them.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from k3compile.runtime.request import Request
from k3compile.runtime.sampling_params import SamplingParams
from k3compile.runtime.speculate.draft import Draft

PAGE, UNIT, BLOCK = 16, 32, 64
ROWS, SEQS, DRAFTS = 160, 4, 3
STRANGER = 9
TEXT = 90  # ids from here on are control tokens


class Ask(NamedTuple):
    """A request. tokens: its prompt, or what follows the turn of request ``turn_of``.

    arrival: the step before which it comes, counted from the end of all of ``after``.
    """

    tokens: list[int]
    max_tokens: int
    arrival: int = 0
    after: tuple[int, ...] = ()
    turn_of: int | None = None
    salt: str = ""


class Known(NamedTuple):
    """A request as it must come out."""

    ask: Ask
    prompt: list[int]
    answer: list[int]


def traffic(seed: int = 0) -> list[Ask]:
    """The twelve requests."""
    rng = random.Random(seed)

    def text(count: int) -> list[int]:
        return [rng.randrange(TEXT) for _ in range(count)]

    first, block = text(156), text(65)
    return [
        Ask(first, 8),
        Ask(text(27), 10),
        Ask(first[:100] + text(30), 6, arrival=3),
        Ask(first[:63], 5, arrival=4),
        Ask(text(64), 3, arrival=5),
        Ask(block, 7, arrival=6),
        Ask(first, 8, arrival=1, after=(0, 2, 5, 7, 10)),
        Ask(text(20), 6, after=(0,), turn_of=0),
        Ask(text(33), 9, arrival=8),
        Ask(first, 1, after=(0,), salt="another tenant"),
        Ask(first[:128] + text(80), 4, arrival=10),
        Ask(block + text(70), 12, after=(5,)),
    ]


def request_of(index: int, prompt: list[int], ask: Ask) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=ask.max_tokens, ignore_eos=True)
    return Request(str(index), prompt, params, arrival=float(index), cache_salt=ask.salt)


class Oracle:
    """A drafter that knows the answers: right, wrong at the first or the last place, short, or silent."""

    lookahead, taps = 0, ()

    def __init__(self, known: Sequence[Known]) -> None:
        self.answers = {str(i): one.answer for i, one in enumerate(known)}

    def observe(self, step: Any, taps: Any) -> None: ...
    def forget(self, request: Request) -> None: ...

    def propose(self, requests: Sequence[Request], holdings: Sequence[Any]) -> list[Draft | None]:
        return [self.draft(request) for request in requests]

    def draft(self, request: Request) -> Draft | None:
        done = request.output_tokens
        tokens = self.answers[request.id][done : done + DRAFTS]
        tokens += [0] * (DRAFTS - len(tokens))
        mood = zlib.crc32(f"{request.id} {done}".encode()) % 5
        if mood in (1, 2):
            place = 0 if mood == 1 else DRAFTS - 1
            tokens[place] = (tokens[place] + 1) % TEXT
        kept = {3: 1, 4: 0}.get(mood, DRAFTS)
        return Draft(tokens[:kept]) if kept else None
