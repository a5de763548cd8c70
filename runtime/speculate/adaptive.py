"""How many drafts of each request are worth their rows.

    confidences of a request     0.9   0.8   0.5
    survivals: their products    0.9   0.72  0.36         a draft counts only if all before it are kept

    b* = argmax_b  (requests + sum of the b largest survivals) / (draft cost + verify cost of rows + b)

The number b comes from the confidences of the step before, so that no device has to be waited for; which
drafts get the b rows, from those of this step. Survivals never rise along a request, so the b largest of all
requests are a prefix of each. What comes out of a request does not depend on any of this, only how soon.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from weakref import WeakKeyDictionary

import numpy as np

from ..engine_config import EngineConfig
from ..executor import Executor, ForwardFn
from ..request import Request
from .costs import CostTable, measure_draft, measure_forward
from .draft import Draft, Drafter, first

log = logging.getLogger(__name__)

LOGIT_BYTES = 1 << 30  # float32 logits of a step's verified rows
MEMORY = 0.9  # how much of an old trial still counts a step later


@dataclass
class Record:
    """What is known of a request. hits of trials: drafts kept of those judged, old ones fading."""

    hits: float = 0.0
    trials: float = 0.0
    confidence: tuple[float, ...] = ()  # of its last draft

    @property
    def estimate(self) -> float:
        """Chance that a draft is kept. Without trials 1: a request has to be tried, and after many steps
        without a row it is tried again.
        """
        return (1.0 + self.hits) / (1.0 + self.trials)


class Adaptive:
    """Chooses how many drafts are verified. Not thread-safe: the engine thread owns it.

    verify: seconds of a forward by its rows. draft: seconds of a draft pass by its requests (None: free).
    vocab_size: bounds the rows by the memory of their logits. measure: makes ``verify`` anew for another
    forward. other_rows: rows expected in the next step beside those of the requests with drafts; set it to
    what the last step had.
    """

    def __init__(
        self,
        verify: CostTable,
        draft: CostTable | None = None,
        vocab_size: int = 1,
        measure: Callable[[ForwardFn], CostTable] | None = None,
    ) -> None:
        self.verify = verify
        self.draft = draft
        self._measure = measure
        self.most_rows = LOGIT_BYTES // (4 * vocab_size)
        self.other_rows = 0
        self.proposed = self.allotted = self.tried = self.kept = 0
        self._records: WeakKeyDictionary[Request, Record] = WeakKeyDictionary()

    def use(self, forward: ForwardFn) -> None:
        """Decide by the costs of ``forward``, the executor's, from now on; measured in the null slot, as at
        the start.
        """
        if self._measure is not None:
            self.verify = self._measure(forward)
            log.info("a step by its rows, in ms: %s", self.verify)

    def trim(self, requests: Sequence[Request], drafts: Sequence[Draft | None]) -> list[Draft | None]:
        """The part of each draft that is worth verifying, None where that is nothing."""
        counts = self.allot(requests, drafts, self.other_rows)
        return [first(draft, count) for draft, count in zip(drafts, counts, strict=True)]

    def allot(
        self, requests: Sequence[Request], drafts: Sequence[Draft | None], other_rows: int = 0
    ) -> list[int]:
        """How many drafts of each of ``requests`` to verify. All of them sample in the next step, beside
        ``other_rows`` rows. Call it once a step.
        """
        records = [self._record(request) for request in requests]
        now = [confidences(draft, record) for draft, record in zip(drafts, records, strict=True)]
        total = sum(map(len, now))
        if not total:
            return [0] * len(now)
        before = [aged(record.confidence, len(c)) for record, c in zip(records, now)]
        cap = min(total, max(self.most_rows - len(requests), 0))
        budget = self.best_budget(survivals(before), len(requests), other_rows, cap)
        counts = top(survivals(now), budget)
        for record, confidence in zip(records, now):
            if confidence:
                record.confidence = confidence
                record.hits *= MEMORY
                record.trials *= MEMORY
        self.proposed += total
        self.allotted += budget
        return counts

    def _record(self, request: Request) -> Record:
        record = self._records.get(request)
        if record is None:
            record = self._records[request] = Record()
        return record

    def best_budget(self, chances: np.ndarray, requests: int, other_rows: int, cap: int) -> int:
        """b*: the number of drafts, at most ``cap``, with the most tokens a second; of equals the fewest."""
        if not cap:
            return 0
        ranked = -np.sort(-chances, axis=None)[:cap]
        tokens = requests + np.concatenate([[0.0], ranked.cumsum()])
        seconds = self.verify.at(requests + other_rows + np.arange(cap + 1))
        if self.draft is not None:
            seconds = seconds + self.draft.at(np.array([requests]))
        return int(np.argmax(tokens / np.maximum(seconds, 1e-9)))

    def learn(self, request: Request, tried: int, kept: int) -> None:
        """Of ``tried`` verified drafts ``kept`` were accepted: trials are those and the one after them."""
        assert 0 <= kept <= tried, f"{kept} of {tried} drafts kept"
        record = self._record(request)
        record.hits += kept
        record.trials += min(kept + 1, tried)
        self.tried += tried
        self.kept += kept

    def forget(self, request: Request) -> None:
        """Drop what is known of a request."""
        self._records.pop(request, None)

    def report(self) -> dict[str, object]:
        """The measured tables and what came of them, for people and for JSON."""
        return {
            "verify": asdict(self.verify),
            "draft": asdict(self.draft) if self.draft else None,
            "proposed": self.proposed,
            "allotted": self.allotted,
            "tried": self.tried,
            "kept": self.kept,
        }


def make_adaptive(
    drafter: Drafter | None, executor: Executor, config: EngineConfig, vocab_size: int
) -> Adaptive | None:
    """What decides for an engine that nobody uses yet, from costs measured on its own forward and drafter;
    None where nothing is drafted or all drafts are to be verified.
    """
    if drafter is None or not config.adaptive_verification:
        return None

    def measure(forward: ForwardFn) -> CostTable:
        """Of the executor's present forward, which this is."""
        return measure_forward(executor, config)

    verify = measure_forward(executor, config)
    log.info("a step by its rows, in ms: %s", verify)
    return Adaptive(verify, measure_draft(drafter, config), vocab_size, measure)


def confidences(draft: Draft | None, record: Record) -> tuple[float, ...]:
    """Of each token of the draft: the drafter's own, or what the request's record says."""
    if draft is None:
        return ()
    if draft.confidence is None:
        return (record.estimate,) * len(draft.tokens)
    return tuple(draft.confidence.tolist())


def aged(confidence: tuple[float, ...], count: int) -> tuple[float, ...]:
    """The last draft's confidences as the guess for ``count`` new tokens; 1 for those it did not have."""
    return (confidence + (1.0,) * count)[:count]


def survivals(confidence: Sequence[tuple[float, ...]]) -> np.ndarray:
    """[R, K] the chance that a draft and all before it are kept, K at least 1; -1 where there is no draft."""
    longest = max(map(len, confidence))
    padded = np.array([c + (0.0,) * (longest - len(c)) for c in confidence])
    absent = np.arange(longest) >= np.array([len(c) for c in confidence])[:, None]
    chances = np.clip(np.nan_to_num(padded), 0.0, 1.0).cumprod(axis=1)
    return np.where(absent, -1.0, chances)


def top(chances: np.ndarray, budget: int) -> list[int]:
    """How many of the ``budget`` largest of [R, K] each request has; of equals earlier drafts come first."""
    order = np.argsort(-chances.T, axis=None, kind="stable")[:budget]
    return np.bincount(order % len(chances), minlength=len(chances)).tolist()
