"""The places where speculation enters a step: after the forward, after the verdict and after the commit.

    forward -> observe -> sample, which verifies -> judge -> settle -> commit -> writes -> propose
               pages                                rows     states              tiers     drafter

Without a drafter nothing is proposed, so nothing is verified and there is nothing to settle.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ..executor import GroupLost
from .draft import Draft, Drafter, sound

if TYPE_CHECKING:
    from ..cache.cache import Holding
    from ..executor import Observe
    from ..request import Request
    from ..step import Batch, Step
    from ..work import Verdict
    from .adaptive import Adaptive

log = logging.getLogger(__name__)

Settle = Callable[["Batch", "Sequence[Verdict]"], None]


class Speculation:
    """The drafter of an engine and what settles the states of verified rows.

    settle: called with the step and what is kept of each piece of work; moves the state of each verify row
    to the end of its kept rows and writes the checkpoint that its verdict names. adaptive: which proposals
    are worth their verification, and how much of each (None: all of all). bounds: (num_drafts, vocab_size)
    of the engine: a longer draft is cut, and ids that are none switch the drafter off (None: not looked at).
    """

    def __init__(
        self,
        drafter: Drafter | None = None,
        settle: Settle | None = None,
        adaptive: Adaptive | None = None,
        bounds: tuple[int, int] | None = None,
    ) -> None:
        self.drafter = drafter
        self._settle = settle
        self.adaptive = adaptive
        self._bounds = bounds
        self.error: str | None = None  # why the drafter was switched off

    @property
    def lookahead(self) -> int:
        """Page positions that the drafter writes past the committed tokens."""
        return self.drafter.lookahead if self.drafter else 0

    @property
    def observer(self) -> Observe | None:
        """What has to see every forward; None while nobody drafts."""
        return self.observe if self.drafter else None

    def use(self, forward: Callable[[Step], tuple[Tensor, Tensor]]) -> None:
        """Another forward serves from now on; what drafts are worth depends on what it costs."""
        adaptive = self.adaptive
        if adaptive is not None:
            self._guarded(lambda _: adaptive.use(forward))

    def settle(self, batch: Batch, verdicts: Sequence[Verdict]) -> None:
        """Bring the states of verified rows to where their requests will be after the commit."""
        if any(v.work.drafts for v in verdicts):
            assert self._settle is not None, "rows were verified and nothing settles their states"
            self._settle(batch, verdicts)
        if self.adaptive is not None:
            self._learn(batch, verdicts, self.adaptive)

    def _learn(self, batch: Batch, verdicts: Sequence[Verdict], adaptive: Adaptive) -> None:
        """What became of the drafts, and how many rows of prompts to expect beside the next ones."""
        adaptive.other_rows = int(batch.step.spans[2])
        for work, _, rows, *_ in verdicts:
            if work.drafts and rows:
                adaptive.learn(work.request, work.drafts, rows - 1)

    def observe(self, step: Step, taps: Tensor) -> None:
        """Let the drafter learn from the forward that just ran."""
        if self.drafter is not None:
            self._guarded(lambda drafter: drafter.observe(step, taps))

    def propose(self, running: Sequence[Request], holdings: Sequence[Holding]) -> None:
        """Give each of ``running``, the requests that decode next, its drafts."""
        if self.drafter is None or not running:
            return
        drafts = self._guarded(lambda drafter: self._drafts(drafter, running, holdings))
        for request, draft in zip(running, drafts or [None] * len(running), strict=True):
            request.propose(draft)

    def _drafts(
        self, drafter: Drafter, running: Sequence[Request], holdings: Sequence[Holding]
    ) -> list[Draft | None]:
        """What can be verified of the drafter's proposals, and is worth it. Raises ValueError for others."""
        drafts = drafter.propose(running, holdings)
        if self._bounds is not None:
            drafts = [sound(draft, *self._bounds) for draft in drafts]
        if len(drafts) != len(running):
            raise ValueError(f"{len(drafts)} drafts were proposed for {len(running)} requests")
        return drafts if self.adaptive is None else self.adaptive.trim(running, drafts)

    def forget(self, request: Request) -> None:
        """The request ended or was thrown out."""
        if self.adaptive is not None:
            self.adaptive.forget(request)
        if self.drafter is not None:
            self._guarded(lambda drafter: drafter.forget(request))

    def _guarded(self, call: Callable[[Drafter], list | None]) -> list | None:
        """Drafts are guesses nobody needs: a drafter that fails is switched off, and the rest goes on. On
        several ranks that is rank 0's decision, and the others hear of it by not being asked any more.
        """
        try:
            return call(self.drafter)
        except GroupLost:
            raise
        except Exception as error:
            log.exception("the drafter failed and is switched off")
            self.error = f"{type(error).__name__}: {error}"
            self.drafter = None
            return None
