"""What a step is made of: work, its result, and what is kept of it.

plan() -> Work      forward -> Result      judge() -> Verdict      commit() -> Progress
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from .request import FinishReason, Request


class Work(NamedTuple):
    """Run ``count`` rows of a request: tokens [seen, seen + count - drafts) and ``drafts`` proposals after
    them.
    """

    request: Request
    count: int
    drafts: int
    samples: bool  # the rows reach the last known token, so a token comes out
    slot: int
    pages: array  # int64 page ids, in token order
    checkpoint: int = 0  # token count whose state the step must leave behind, 0 for none
    checkpoint_slot: int = 0  # where
    scratch: Sequence[int] = ()  # slots of the candidate states of a verify row, when states are not replayed


class Result(NamedTuple):
    """What a step made of a piece of work: the new tokens, or why it failed."""

    work: Work
    tokens: Sequence[int] = ()
    error: str | None = None


class Verdict(NamedTuple):
    """What is kept of a result. A request that is gone, or that failed, keeps nothing."""

    work: Work
    tokens: list[int]  # those the request keeps, a stop token among them
    rows: int  # of the work's, from its first: their tokens are in the cache from now on
    finish: FinishReason | None = None
    error: str | None = None
    checkpoint: int = 0  # of a verify row: token count inside or at the end of ``rows`` whose state is wanted
    checkpoint_slot: int = 0  # where


class Progress(NamedTuple):
    """What a request gained in a step."""

    request: Request
    tokens: list[int]
    finish: FinishReason | None
    error: str | None = None
