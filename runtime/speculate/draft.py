"""What a drafter hands over and what every drafter can do.

tokens        x_1      x_2      x_3          proposed to follow the last known token
probs         q_1(.)   q_2(.)   q_3(.)       what each was drawn from, given the ones before it
confidence    c_1      c_2      c_3          chance that it is accepted, if the ones before it are
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from .verify import NO_DRAFT

if TYPE_CHECKING:
    from ..cache.holding import Holding
    from ..request import Request
    from ..step import Step


class Draft(NamedTuple):
    """A proposal of k tokens for one request.

    probs: [k, V] float, the distribution each token was *really* drawn from, after temperature and whatever
    else shaped it; None: nothing was drawn, each token had probability 1 (one-hot). confidence: [k] float in
    [0, 1]; None: unknown. It decides how many drafts are worth verifying and never what comes out.
    """

    tokens: list[int]
    probs: Tensor | None = None
    confidence: Tensor | None = None


def sound(draft: Draft | None, most: int, vocab_size: int) -> Draft | None:
    """The first ``most`` tokens of a draft at most, up to a NO_DRAFT; None where none are left.

    Raises ValueError for what no target of ``vocab_size`` ids could verify.
    """
    if draft is None:
        return None
    tokens, count = draft.tokens, min(len(draft.tokens), most)
    if not isinstance(tokens, list):
        raise ValueError(f"the tokens of a draft must be a list of ids, got {type(tokens)}")
    for name, part, shape in (
        ("probs", draft.probs, (len(tokens), vocab_size)),
        ("confidence", draft.confidence, (len(tokens),)),
    ):
        if part is not None and part.shape != shape:
            raise ValueError(f"the {name} of a draft are {[*part.shape]} and must be {[*shape]}")
    for place, token in enumerate(tokens[:count]):
        if token == NO_DRAFT:
            count = place
            break
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ValueError(f"a draft holds {token!r}, token ids are from 0 to {vocab_size - 1}")
    return first(draft, count)


def first(draft: Draft | None, count: int) -> Draft | None:
    """The first ``count`` tokens of a draft; None where that is nothing."""
    if draft is None or not count or count == len(draft.tokens):
        return draft if count else None
    parts = [part if part is None else part[:count] for part in draft[1:]]
    return Draft(draft.tokens[:count], *parts)


class Drafter(Protocol):
    """Proposes tokens. All of it runs on the engine thread, between the steps.

    lookahead: page positions that :meth:`propose` writes past the committed tokens; 0 when it writes none.
    taps: layers after which the forward shall hand out its stream, for :meth:`observe`.
    """

    lookahead: int
    taps: tuple[int, ...]

    def observe(self, step: Step, taps: Tensor) -> None:
        """Learn from a forward: ``taps`` [len(self.taps), T, D] are the streams of all its rows."""

    def propose(self, requests: Sequence[Request], holdings: Sequence[Holding]) -> list[Draft | None]:
        """A draft, or none, for each of ``requests``: those that decode next, after the commit."""

    def forget(self, request: Request) -> None:
        """Drop what is kept about a request; one that was never seen is fine."""
