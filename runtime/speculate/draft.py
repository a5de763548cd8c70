"""What a drafter hands over and what every drafter can do.

tokens        x_1      x_2      x_3          proposed to follow the last known token
probs         q_1(.)   q_2(.)   q_3(.)       what each was drawn from, given the ones before it
confidence    c_1      c_2      c_3          chance that it is accepted, if the ones before it are
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

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
