"""Which tokens of which requests make up the next step.

    waiting --admit--> running --commit--> finished
       ^  |               |
       |  +--> loading ->-+       a longer prefix comes from a tier; or not, and the request runs from its hit
       +----- preempt ----+       pages and slot go back, seen = 0; what is cached is found again

``plan()`` picks the work and moves nothing but pages and slots; ``judge()`` says what is kept of what came
out, and ``commit()`` moves the counters, after the states have been brought to where they say. Running
requests come first, in service order, decodes and unfinished prompts alike; then waiting ones while they
fit, each from where the cache knows it. When pages run out the newest request yields. Plain Python without
torch, linear in the number of requests.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .budget import Limits
from .cache.cache import Cache, Hit, Holding
from .cache.checkpoints import Chunk, plan_chunk
from .repeat import end_of_repeats
from .request import FinishReason, Request, cut
from .share import MOST_WAITS, Coming, share_of
from .work import Progress, Result, Verdict, Work

if TYPE_CHECKING:
    from .cache.tiers.connector import Connector


ONE_ROW = Chunk(1, 0)  # of a request that decodes
PATIENCE = 64  # steps that a request waits for a prefix that somebody else runs, without getting any of it


def rank_of(request: Request) -> tuple[int, float]:
    return request.rank


class Scheduler:
    """Plans steps over a :class:`Cache` under :class:`Limits`. Not thread-safe: the engine thread owns it."""

    def __init__(self, limits: Limits, cache: Cache, eos_ids: frozenset[int] = frozenset()) -> None:
        self.limits = limits
        self.cache = cache
        self.grid = cache.grid
        self.eos_ids = eos_ids
        self.waiting: list[Request] = []  # by rank
        self.running: list[Request] = []  # by rank
        self.loading: list[Request] = []  # by rank: they own pages and a slot, and wait for a tier
        self.tiers: Connector | None = None
        self.preemptions = 0
        self.prefix_query_tokens = 0  # of prompts, each counted when it was first let in
        self.prefix_hit_tokens = 0
        self.exports = False  # whether the forward leaves checkpoints inside a row
        self.lookahead = 0  # page positions that a drafter writes after the last token
        self._planned = False
        self._empty = 0  # plans in a row without work
        self._given_up: list[Progress] = []
        self._patience: dict[Request, tuple[int, int]] = {}  # who waits: its hit, and steps without a longer
        self._gone: list[Request] = []  # ended or thrown out, and nobody was told

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError when it could never run, however empty the engine is."""
        self.check(request)
        request.stops = request.stop_ids | self.eos_ids
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
        return not self.waiting and not self.running and not self.loading

    def plan(self) -> list[Work]:
        """Pick this step's work and take the pages and slots it needs.

        Call :meth:`commit` before the next plan, also when there is no work.
        """
        assert not self._planned, "plan() twice without commit()"
        self._planned = True
        limits, charge = self.limits, self.limits.row_charge
        room = limits.step_budget
        share = share_of(limits, self.cache, self.running, self.waiting[: max(0, self._free_places())])
        running, work, preempted = self.running, [], False
        while len(work) < len(running):
            request = running[len(work)]
            if (again := request.again) is not None and not request.drafts:
                work.append(again)
                room -= 1 + charge
                continue
            later = (len(running) - len(work) - 1) * (1 + charge)  # a row for each that follows
            chunk = self._chunk(request, room - charge - later, share, self.cache.junction(request))
            holding = self.cache.grow(request, self._reach(request, chunk.count))
            if holding is None:
                newest = max([*running[-1:], *self.loading[-1:]], key=rank_of)
                self.preempt(newest)  # perhaps the request itself
                preempted = True
                continue
            work.append(self._work(request, chunk, holding))
            room -= chunk.count + charge
        if not preempted:
            self._admit(work, room, share)
        self._watch(work)
        return work

    def _admit(self, work: list[Work], room: int, share: int) -> None:
        """Let waiting requests in, in their order, each from where the cache knows it, and add their work."""
        charge, running, at = self.limits.row_charge, self.running, 0
        if not self.waiting:
            return
        coming = Coming(self.cache)
        for request in running:
            if request.again is None:  # who decodes leaves no prefix
                coming.add(request, request.seen, self.cache.junction(request))
        while at < min(len(self.waiting), self._free_places(), MOST_WAITS) and room > charge:
            request = self.waiting[at]
            hit = self.cache.match(request)
            if self._waits(request, hit, coming):
                at += 1
                continue
            request.seen = hit.tokens
            below = self.tiers.reach(request, hit) if self.tiers else 0
            if below > hit.tokens:
                chunk = Chunk(below - hit.tokens, 0)
            else:
                chunk = self._chunk(request, room - charge, share, hit.junction)
            if not self.cache.admit(request, hit, self._reach(request, chunk.count), reserve=len(running)):
                request.seen = 0
                return  # no pages or no slot; nobody overtakes, or a long prompt would wait for ever
            del self.waiting[at]
            self._count_hit(request, hit.tokens, asked=request.prompt_tokens)
            if below > hit.tokens:
                self._load(request, below)
                continue
            coming.add(request, hit.tokens, hit.junction)
            insort(running, request, key=rank_of)
            work.append(self._work(request, chunk, self.cache.holding(request)))
            room -= chunk.count + charge

    def _load(self, request: Request, end: int) -> None:
        """Let an admitted request wait for its prefix, or run from its hit with the next step."""
        started = self.tiers.start(request, request.seen, end)
        insort(self.loading if started else self.running, request, key=rank_of)

    def _count_hit(self, request: Request, found: int, asked: int = 0) -> None:
        """Count what a request gets without running it, unless it had run it itself."""
        self._patience.pop(request, None)
        if not request.preemptions:
            request.cached_tokens += found
            self.prefix_query_tokens += asked
            self.prefix_hit_tokens += found

    def _waits(self, request: Request, hit: Hit, coming: Coming) -> bool:
        """Whether a request is left out of this step, because more of its prefix than the hit is being run
        for somebody else. A wait that brings no longer hit in PATIENCE steps ends.
        """
        if coming.holds_more_of(request, hit.tokens):
            self.cache.declines["deferred"] += 1
        elif not self.cache.deferred(request, hit):
            return False
        tokens, steps = self._patience.get(request, (hit.tokens, 0))
        steps = steps + 1 if tokens == hit.tokens else 0
        self._patience[request] = (hit.tokens, steps)
        return steps < PATIENCE

    def _free_places(self) -> int:
        return self.limits.max_active - len(self.running) - len(self.loading)

    def loaded(self, request: Request, tokens: int) -> None:
        """A request that waits for a tier has the prefix of ``tokens`` tokens in its pages and slot; that is
        ``seen`` where the load failed.
        """
        self.loading.remove(request)
        insort(self.running, request, key=rank_of)
        if tokens == request.seen:
            return
        self._count_hit(request, tokens - request.seen)
        request.seen = tokens
        self.cache.advance(request, loaded=True)

    def _watch(self, work: list[Work]) -> None:
        """Never two empty steps in a row: a request that cannot be served even alone gets an error."""
        pending = self.loading or self.cache.index.pinned  # a tier will give pages back or fill them
        self._empty = 0 if work or self.idle or pending else self._empty + 1
        if self._empty < 2:
            return
        self._empty, request = 0, self.waiting.pop(0)
        self._end(request, "error")
        error = (
            f"the request of {len(request.tokens)} tokens cannot get on: with nothing else running, "
            f"{self.cache.available} of {self.cache.pages.size - 1} pages and {len(self.cache.slots)} state "
            "slots can be had"
        )
        self._given_up.append(Progress(request, [], "error", error))

    def judge(self, results: Sequence[Result]) -> list[Verdict]:
        """What each request keeps of its result; the counters stay. May be asked again, as when what follows
        fails.
        """
        new, verdicts = tuple.__new__, []
        for result in results:
            work, tokens, error = result
            request = work.request
            if (
                work is request.again
                and error is None
                and len(tokens) == 1
                and (token := tokens[0]) not in request.stops
            ):
                verdicts.append(new(Verdict, (work, [token], 1, None, None, 0, 0)))
            else:
                verdicts.append(self._verdict(result))
        return verdicts

    def commit(self, verdicts: Sequence[Verdict]) -> list[Progress]:
        """Move the counters by what the step did, and publish what it left in the cache; finished requests
        leave and give their pages and slot back.
        """
        self._planned = False
        new, (progress, self._given_up) = tuple.__new__, (self._given_up, [])
        ended = bool(progress)
        for verdict in verdicts:
            work, tokens, rows, finish, error, _, _ = verdict
            request = work.request
            if work is request.again and finish is None and len(tokens) == 1:
                request.seen = seen = request.seen + 1
                request.tokens.append(tokens[0])
                if seen == request.again_until:
                    request.again = None
                    self.cache.advance(request)
                progress.append(new(Progress, (request, tokens, None, None)))
                continue
            if request.finish is not None:
                continue  # aborted while the step ran
            request.propose(None)
            request.seen += rows
            for token in tokens:  # most often one: extend() would cost three times as much
                request.tokens.append(token)
            if error is None:
                self.cache.advance(request)
            if finish is not None:
                self._end(request, finish)
                ended = True
            else:
                self._repeat(work)
            if tokens or finish is not None:
                progress.append(Progress(request, tokens, finish, error))
        if ended:
            self.running = [r for r in self.running if r.finish is None]
        return progress

    def _repeat(self, work: Work) -> None:
        """Plan the same work again while nothing about it can change (:mod:`.repeat`)."""
        request = work.request
        until = end_of_repeats(work, self.cache, self.limits, self.lookahead)
        request.again, request.again_until = (work, until) if request.seen < until else (None, 0)

    def abort(self, request: Request, reason: FinishReason = "abort") -> bool:
        """End a request now, wherever it is. False when it had already ended."""
        if request.finish is not None:
            return False
        self._leave(request)
        self._end(request, reason)
        return True

    def preempt(self, request: Request) -> None:
        """Put a request that runs or loads back in the queue, to replay its prompt and output later."""
        self._leave(request)
        self._give_back(request)
        request.seen, request.again = 0, None
        request.propose(None)
        self._gone.append(request)
        request.preemptions += 1
        self.preemptions += 1
        insort(self.waiting, request, key=rank_of)

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.finish, request.again = reason, None
        self._patience.pop(request, None)
        self._give_back(request)
        self._gone.append(request)

    def _leave(self, request: Request) -> None:
        next(q for q in (self.waiting, self.running, self.loading) if request in q).remove(request)

    def _give_back(self, request: Request) -> None:
        if self.tiers is not None:
            self.tiers.forget(request)
        self.cache.release(request)

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
        request = work.request
        if request.finish is not None:
            return Verdict(work, [], 0)
        if error is not None:
            return Verdict(work, [], 0, "error", error)
        kept, finish = cut(request, tokens, self.eos_ids, self.limits.max_model_len)
        if not work.drafts:
            return Verdict(work, kept, work.count, finish)
        # Of the drafts, the accepted ones are in the cache; each came out as a token, and one more did.
        rows = work.count - work.drafts + len(kept) - 1
        return Verdict(work, kept, rows, finish, None, *self._place_of_state(request, rows))

    def _place_of_state(self, request: Request, rows: int) -> tuple[int, int]:
        """Token count and slot for the last state worth keeping in verified rows, or zeros."""
        end = request.seen + rows
        mark = end // self.grid.unit * self.grid.unit if self.grid else 0
        slot = self.cache.checkpoint(request, mark) if mark > request.seen else 0
        return (mark, slot) if slot else (0, 0)

    def _chunk(self, request: Request, room: int, share: int, junction: int = 0) -> Chunk:
        """Rows for a request: all it needs, cut to the room, to where a state is to be kept and, for a prompt
        longer than a step, to its share.
        """
        unseen = request.unseen
        if unseen == 1:
            if not request.drafts:
                return ONE_ROW
            left = min(request.room, self.limits.max_model_len - len(request.tokens))  # a row gives a token
            return Chunk(min(1 + len(request.drafts), left, room), 0)
        if unseen > self.limits.step_budget:
            room = min(room, share)
        granted = min(unseen, room)
        if self.grid is None:
            return Chunk(granted, 0)
        return plan_chunk(self.grid, request.seen, granted, len(request.tokens), self.exports, junction)

    def _work(self, request: Request, chunk: Chunk, holding: Holding) -> Work:
        """The chunk with the places it needs; without a slot for its checkpoint it leaves none."""
        unseen, (count, checkpoint) = request.unseen, chunk
        slot = self.cache.checkpoint(request, checkpoint) if checkpoint else 0
        scratch = holding.slots if len(holding.slots) > 1 else ()
        drafts, samples = max(count - unseen, 0), count >= unseen
        place = (checkpoint, slot) if slot else (0, 0)
        return Work(request, count, drafts, samples, holding.slot, holding.pages, *place, scratch)

    def _reach(self, request: Request, count: int) -> int:
        """Tokens from ``seen`` on that pages are needed for: the rows, and what a drafter writes after them
        when a token comes out.
        """
        if not self.lookahead or count < request.unseen:
            return count
        end = min(request.seen + count + self.lookahead, self.limits.max_model_len, self.cache.capacity)
        return max(count, end - request.seen)
