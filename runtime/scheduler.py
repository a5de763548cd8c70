"""Which tokens of which requests make up the next step.

    waiting --admit--> running --commit--> finished
       ^                  |
       +----- preempt ----+       pages and slot go back, seen = 0

``plan()`` picks the work and moves nothing but pages and slots; ``judge()`` says what is kept of what came
out, and ``commit()`` moves the counters, after the states have been brought to where they say. Running
requests come first, in service order, decodes and unfinished prompts alike; then waiting ones while they
fit. When pages run out the newest request yields. Plain Python without torch, linear in the number of
requests.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Sequence
from typing import NamedTuple

from .budget import Limits, chunk
from .cache.cache import NO_HIT, Cache, Holding
from .request import FinishReason, Request, cut


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


def rank_of(request: Request) -> tuple[int, float]:
    return request.rank


class Scheduler:
    """Plans steps over a :class:`Cache` under :class:`Limits`. Not thread-safe: the engine thread owns it."""

    def __init__(self, limits: Limits, cache: Cache, eos_ids: frozenset[int] = frozenset()) -> None:
        self.limits = limits
        self.cache = cache
        self.eos_ids = eos_ids
        self.waiting: list[Request] = []  # by rank
        self.running: list[Request] = []  # by rank
        self.preemptions = 0
        self.exports = False  # whether the forward leaves checkpoints inside a row
        self._planned = False
        self._gone: list[Request] = []  # ended or thrown out, and nobody was told

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError when it could never run, however empty the engine is."""
        self.check(request)
        insort(self.waiting, request, key=rank_of)

    def check(self, request: Request) -> None:
        """Refuse a request that no emptiness of the engine would let run; raises ValueError."""
        longest = self.limits.max_model_len
        if request.prompt_tokens >= longest:
            raise ValueError(
                f"prompt has {request.prompt_tokens} tokens, and with one to generate that is more than "
                f"max_model_len={longest}: shorten the prompt or start with a larger max_model_len"
            )
        wanted = longest
        if request.params.max_tokens is not None:
            wanted = min(longest, request.prompt_tokens + request.params.max_tokens)
        if wanted > self.cache.capacity:
            raise ValueError(
                f"the request may grow to {wanted} tokens but all pages together hold {self.cache.capacity}: "
                "lower max_tokens or start with more pages"
            )

    @property
    def idle(self) -> bool:
        """Nothing to run."""
        return not self.waiting and not self.running

    def plan(self) -> list[Work]:
        """Pick this step's work and take the pages and slots it needs.

        Call :meth:`commit` before the next plan.
        """
        assert not self._planned, "plan() twice without commit()"
        self._planned = True
        limits, charge = self.limits, self.limits.row_charge
        room, share = limits.step_budget, self._share()
        running, work, preempted = self.running, [], False
        while len(work) < len(running):
            request = running[len(work)]
            later = (len(running) - len(work) - 1) * (1 + charge)  # a row for each that follows
            count = self._count(request, room - charge - later, share)
            holding = self.cache.grow(request, count)
            if holding is None:
                self.preempt(running[-1])  # the newest yields, perhaps the request itself
                preempted = True
                continue
            work.append(make_work(request, count, holding))
            room -= count + charge
        while self.waiting and not preempted and room > charge and len(running) < limits.max_active:
            request = self.waiting[0]
            count = self._count(request, room - charge, share)
            if not self.cache.admit(request, NO_HIT, count, reserve=len(running)):
                break  # no pages or no slot; nobody overtakes, or a long prompt would wait for ever
            del self.waiting[0]
            insort(running, request, key=rank_of)
            work.append(make_work(request, count, self.cache.holding(request)))
            room -= count + charge
        return work

    def judge(self, results: Sequence[Result]) -> list[Verdict]:
        """What each request keeps of its result; the counters stay. May be asked again, as when what follows
        fails.
        """
        return [self._verdict(result) for result in results]

    def commit(self, verdicts: Sequence[Verdict]) -> list[Progress]:
        """Move the counters by what the step did; finished requests leave and give their pages and slot
        back.
        """
        self._planned = False
        progress, ended = [], False
        for verdict in verdicts:
            request = verdict.work.request
            if request.finish is not None:
                continue  # aborted while the step ran
            request.propose(None)
            request.seen += verdict.rows
            request.tokens.extend(verdict.tokens)
            if verdict.finish is not None:
                request.finish = verdict.finish
                self.cache.release(request)
                self._gone.append(request)
                ended = True
            if verdict.tokens or verdict.finish is not None:
                progress.append(Progress(request, verdict.tokens, verdict.finish, verdict.error))
        if ended:
            self.running = [r for r in self.running if r.finish is None]
        return progress

    def abort(self, request: Request, reason: FinishReason = "abort") -> bool:
        """End a request now, wherever it is. False when it had already ended."""
        if request.finish is not None:
            return False
        request.finish = reason
        queue = self.waiting if request in self.waiting else self.running
        queue.remove(request)
        self.cache.release(request)
        self._gone.append(request)
        return True

    def preempt(self, request: Request) -> None:
        """Put a running request back in the queue, to replay its prompt and output later."""
        self.running.remove(request)
        self.cache.release(request)
        request.seen = 0
        request.propose(None)
        self._gone.append(request)
        request.preemptions += 1
        self.preemptions += 1
        insort(self.waiting, request, key=rank_of)

    def take_gone(self) -> list[Request]:
        """The requests that ended or were thrown out since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def decoding(self) -> list[Request]:
        """The running requests that decode next and can use a draft: those with room for two tokens more."""
        longest = self.limits.max_model_len
        return [r for r in self.running if r.unseen == 1 and min(r.room, longest - len(r.tokens)) > 1]

    def _verdict(self, result: Result) -> Verdict:
        work, tokens, error = result
        if work.request.finish is not None:
            return Verdict(work, [], 0)
        if error is not None:
            return Verdict(work, [], 0, "error", error)
        kept, finish = cut(work.request, tokens, self.eos_ids, self.limits.max_model_len)
        # Of the drafts, the accepted ones are in the cache; each came out as a token, and one more did.
        rows = work.count if not work.drafts else work.count - work.drafts + len(kept) - 1
        return Verdict(work, kept, rows, finish)

    def _count(self, request: Request, room: int, share: int) -> int:
        """Rows for a request: all it needs, cut to the room and, for a prompt longer than a step, to its
        share.
        """
        unseen = request.unseen
        if unseen == 1:
            return min(1 + len(request.drafts), room, self.limits.max_model_len - request.seen)
        if unseen > self.limits.step_budget:
            room = min(room, share)
        return chunk(request.seen, min(unseen, room), request.seen + unseen, self.limits.granule)

    def _share(self) -> int:
        """The most rows a prompt that is longer than a step gets, so that others get on beside it."""
        limits = self.limits
        budget = limits.step_budget
        unseen = [r.unseen for r in self.running]
        pages = len(self.cache.pages)
        for request in self.waiting[: max(0, limits.max_active - len(self.running))]:
            pages -= self.cache.pages_for(len(request.tokens))
            if pages < 0:
                break
            unseen.append(request.unseen)
        if len(unseen) < 2 or max(unseen) <= budget:
            return budget
        prompts = [u for u in unseen if u > 1]
        rows = budget - len(unseen) * limits.row_charge - (len(unseen) - len(prompts))
        fair = rows // len(prompts)
        light = [u for u in prompts if u <= fair]
        least = min(limits.long_prefill_tokens, budget // 2)
        return max((rows - sum(light)) // (len(prompts) - len(light)), least, 1)


def make_work(request: Request, count: int, holding: Holding) -> Work:
    unseen = request.unseen
    return Work(request, count, max(count - unseen, 0), count >= unseen, holding.slot, holding.pages)
