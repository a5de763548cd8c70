"""The thread that serves: plan, build, forward, sample, commit, and tell each request what it got.

    any thread                 engine thread
    submit, abort  -> inbox -> take inbox -> plan -> build -> forward -> sample -> commit -> on_update

Nothing but the inbox, :meth:`Engine.use` and the snapshot of :meth:`Engine.stats` is shared between
threads. Without ``start()`` the caller turns the crank with :meth:`Engine.step`, which is how the offline
front door works.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .cache.cache import Cache
from .cache.orders import Copy, PoisonAll
from .cache.tiers.connector import Connector
from .cache.writes import Pools
from .engine_config import EngineConfig
from .executor import Executor, ForwardFn, GroupLost
from .request import FinishReason, Request
from .sampler import Choice, Sampler, TokenLogprobs
from .scheduler import Scheduler
from .speculate.speculation import Speculation
from .stats import Counters, EngineStats
from .step import Batch, build
from .updates import EngineClosed, Goodbye, Live, OnUpdate, QueueFull, Update, last_words
from .work import Progress, Result, Verdict, Work

__all__ = ["Engine", "EngineClosed", "ForwardFn", "OnUpdate", "QueueFull", "Update"]

log = logging.getLogger(__name__)

STORE_S = 5.0  # how long what was published may take to be stored when the engine stops


class Ran(NamedTuple):
    """What a forward pass gave."""

    batch: Batch
    choices: dict[Request, Choice]


class Engine:
    """Serves requests with ``executor``'s model over the pages and slots of ``cache``.

    executor: what this rank, or every one, does with its pools, which are cleared as the cache says.
    vocab_size: of its logits. eos_ids end a request unless it ignores them. config.max_model_len None: what
    the pages hold. tiers: keep what the pools forget.
    """

    def __init__(
        self,
        executor: Executor,
        cache: Cache,
        config: EngineConfig,
        vocab_size: int,
        eos_ids: Sequence[int] | frozenset[int] = (),
        *,
        speculation: Speculation | None = None,
        tiers: Connector | None = None,
    ) -> None:
        self.config = config
        self.executor = executor
        self.cache = cache
        self.vocab_size = vocab_size
        self.eos_ids = frozenset(eos_ids)
        self.max_model_len = config.max_model_len or cache.capacity
        self.scheduler = Scheduler(config.limits(self.max_model_len), cache, self.eos_ids)
        self.sampler = Sampler(self.eos_ids, config.verification)
        self.speculation = speculation or Speculation()
        self.tiers = self.scheduler.tiers = tiers
        self._forward = self._next_forward = executor.forward
        self._costs_old = False  # whether drafts are chosen by what another forward cost
        self._live: dict[str, Live] = {}  # engine thread only
        self._known: set[str] = set()  # ids in the inbox or live; under the lock
        self._inbox: deque[Live | Goodbye] = deque()
        self._taken = self._inbox  # what the engine thread took out last
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed: str | None = None  # why no more requests are taken
        self._deadline: float | None = None  # when draining gives up
        self._counters = Counters()
        self._stalled = False  # the last plan had no work
        self._switch()
        if config.poison:
            executor.write([PoisonAll()])

    @property
    def pools(self) -> Pools:
        """The tensors behind the cache, of this rank."""
        return self.executor.pools

    def use(self, forward: ForwardFn) -> None:
        """Run ``forward`` from the next step on. Thread-safe."""
        self._next_forward = forward

    def _switch(self) -> None:
        """Take the forward of this step; whether it exports decides how prompts are cut."""
        if self._next_forward is not self._forward:
            self._forward, self._costs_old = self._next_forward, True
            self.executor.use(self._forward)
        self._exports = self.scheduler.exports = self.executor.exports
        self.scheduler.lookahead = self.speculation.lookahead
        # Without replay the measured rows need the slots of requests, so it waits until nobody has one.
        if self._costs_old and (self.config.state_replay or not self.cache.slots.used):
            self._costs_old = False
            self.speculation.use(self._forward)

    def submit(self, request: Request, on_update: OnUpdate) -> None:
        """Queue a request; ``on_update`` is called on the engine thread, at least once, the last time with
        a finish.

        Raises ValueError for what could never run, :class:`QueueFull`, :class:`EngineClosed`. Thread-safe.
        """
        self.check(request)
        with self._wake:
            if self._closed is not None:
                raise EngineClosed(self._closed)
            if request.id in self._known:
                raise ValueError(f"id {request.id!r} belongs to a request that is still running")
            queued = self._queued()
            if queued >= self.config.max_waiting:
                raise QueueFull(f"{queued} requests wait, at most {self.config.max_waiting} may")
            self._known.add(request.id)
            self._inbox.append(Live(request, on_update))
            self._wake.notify_all()

    def check(self, request: Request) -> None:
        """Raise ValueError, naming the field, for a request that could never run. Thread-safe."""
        least, most = torch.frombuffer(request.tokens, dtype=torch.int64).aminmax()
        if not 0 <= least <= most < self.vocab_size:
            raise ValueError(f"prompt holds a token id outside 0 to {self.vocab_size - 1}")
        request.params.check_vocabulary(self.vocab_size)
        self.scheduler.check(request)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> None:
        """End a request before the next step; an unknown or finished id is fine. Thread-safe.

        reason: what it counts as: "stop" where the caller found the end, as of a stop string.
        """
        with self._wake:
            if request_id in self._known:
                self._inbox.append(Goodbye(request_id, reason))
                self._wake.notify_all()

    def start(self) -> None:
        """Serve on a thread of its own until :meth:`stop`."""
        assert self._thread is None, "the engine is already started"
        self._thread = threading.Thread(target=self._serve, name="k3-engine", daemon=True)
        self._thread.start()

    def stop(self, drain_s: float = 0.0) -> None:
        """Take no more requests, give those inside ``drain_s`` seconds to end, abort the rest, join the
        thread. A second call can shorten the time and not lengthen it.
        """
        with self._wake:
            self._closed = self._closed or "the engine is stopping"
            deadline = time.monotonic() + drain_s
            self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)
            self._wake.notify_all()
        thread = self._thread
        if thread is not None:
            thread.join()
            self._thread = None
        else:
            self._end_all("abort", None)
        if self.tiers is not None:
            self._write()
            self.tiers.publish()
            self.tiers.close(STORE_S)
        self.executor.stop()

    @property
    def alive(self) -> bool:
        """Whether the engine takes requests."""
        return self._closed is None

    def stats(self) -> EngineStats:
        """A snapshot; thread-safe."""
        c, cache, scheduler = self._counters, self.cache, self.scheduler
        pages, slots = cache.pages, cache.slots
        started = c.step_started
        with self._wake:
            waiting = self._queued()
        return EngineStats(
            running=len(scheduler.running),
            waiting=waiting,
            pages_used=pages.size - 1 - cache.available,  # what is only kept can go
            pages_total=pages.size - 1,
            slots_used=slots.used,
            slots_total=slots.size - 1,
            steps=c.steps,
            rows=c.rows,
            prompt_tokens=c.prompt_tokens,
            output_tokens=c.output_tokens,
            preemptions=scheduler.preemptions,
            finished=dict(c.finished),
            failed_steps=c.failed_steps,
            last_error=c.last_error,
            current_step_s=0.0 if started is None else time.monotonic() - started,
            time_to_first_token=c.time_to_first_token.snapshot(),
            time_between_tokens=c.time_between_tokens.snapshot(),
            time_of_request=c.time_of_request.snapshot(),
            prefix_query_tokens=scheduler.prefix_query_tokens,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            evicted_pages=cache.index.evicted_pages,
            evicted_states=cache.index.evicted_states,
            prefix_declines=dict(cache.declines),
            drafts_proposed=tuple(c.drafts_proposed),
            drafts_accepted=tuple(c.drafts_accepted),
            offload=self.tiers.offload.stats() if self.tiers else None,
        )

    def step(self) -> bool:
        """Take what came in and run one step; False when there is nothing to run. One thread at a time."""
        self._take_inbox()
        self._switch()
        if self.tiers is not None:
            self.tiers.bring(self.scheduler, self._write, self._stalled)
        if self.scheduler.idle:
            return False
        work = self.scheduler.plan()
        self._stalled = not work
        if not work:  # a tier is waited for, somebody yields everything, or gets an error as nothing helps
            self._finish([], {})
            return True
        self._counters.step_started = time.monotonic()
        ran: Ran | None = None
        try:
            ran = self._run(work)
            results = [result_of(w, ran.choices.get(w.request)) for w in work]
            verdicts = self.scheduler.judge(results)
            self.speculation.settle(ran.batch, verdicts)
        except GroupLost as error:  # nothing can be run any more
            self.fail(str(error))
            self._finish(self._failed(work, str(error)), {})
            raise
        except Exception as error:  # a forward can fail in any way: its requests end, the others go on
            log.exception("step %d failed with %d requests in it", self._counters.steps, len(work))
            self._counters.failed_steps += 1
            self._counters.last_error = f"{type(error).__name__}: {error}"
            verdicts, ran = self._failed(work, self._counters.last_error), None
        except BaseException:  # Ctrl-C offline: the books must be right for the next call
            self._finish(self._failed(work, "interrupted"), {})
            raise
        self._finish(verdicts, ran.choices if ran else {})
        self._speculate(ran)
        return True

    def _failed(self, work: list[Work], error: str) -> list[Verdict]:
        return self.scheduler.judge([Result(w, error=error) for w in work])

    def _finish(self, verdicts: list[Verdict], choices: dict[Request, Choice]) -> None:
        """Close the step's books, write what the cache asks, and tell everybody what they got."""
        self._counters.step_started = None
        self._counters.steps += bool(verdicts)
        self._counters.rows += sum(v.work.count for v in verdicts)
        progress = self.scheduler.commit(verdicts)
        self._write()
        if self.tiers is not None:
            self.tiers.publish()
        for verdict in verdicts:
            if (drafts := verdict.work.drafts) and (choice := choices.get(verdict.work.request)):
                self._counters.count_drafts(drafts, len(choice.tokens) - 1)
        for gained in progress:
            choice = choices.get(gained.request)
            listed = choice.logprobs[: len(gained.tokens)] if choice and choice.logprobs else None
            self._deliver(gained, listed or None)

    @torch.no_grad()
    def _run(self, work: list[Work]) -> Ran:
        """One forward pass: the choice for each request that gets a token."""
        self._write()
        config = self.config
        batch = build(work, config.max_num_seqs, config.num_drafts, exports=self._exports)
        ends = [] if self._exports else [w for w in batch.work if w.checkpoint]
        assert all(w.checkpoint == w.request.seen + w.count for w in ends), "a state inside a row"
        copies = Copy([w.slot for w in ends], [w.checkpoint_slot for w in ends])
        # What a drafter keeps is in the pages when this returns, and only then does the commit publish them.
        logits = self.executor.run(batch.step, batch.logit_rows, copies, self.speculation.observer)
        if logits is None:
            return Ran(batch, {})
        owners = [w.request for w in batch.samples]
        chosen = self.sampler.sample(logits, owners, [w.drafts for w in batch.samples])
        return Ran(batch, dict(zip(owners, chosen, strict=True)))

    def _write(self) -> None:
        if orders := self.cache.take_writes():
            self.executor.write(orders)

    @torch.no_grad()
    def _speculate(self, ran: Ran | None) -> None:
        """Get drafts for the requests that decode next."""
        for request in self.scheduler.take_gone():
            self.speculation.forget(request)
        if ran is not None:
            running = self.scheduler.decoding()
            self.speculation.propose(running, [self.cache.holding(r) for r in running])

    def _queued(self) -> int:
        """Requests that wait, under the lock. One that was aborted during a long step waits no more, though
        the step has to end before it can leave.
        """
        aborted = {item.id for item in self._inbox if isinstance(item, Goodbye)}
        news = [item.request for item in self._inbox if isinstance(item, Live)]
        return sum(request.id not in aborted for request in [*self.scheduler.waiting, *news])

    def _take_inbox(self) -> None:
        with self._wake:
            self._taken, self._inbox = self._inbox, deque()
        for item in self._taken:
            if isinstance(item, Live):
                self._live[item.request.id] = item
                self.scheduler.add(item.request)
            elif item.id in self._live:
                self._end(self._live[item.id], item.reason, None)

    def _end(self, live: Live, reason: FinishReason, error: str | None) -> None:
        if self.scheduler.abort(live.request, reason):
            self._deliver(Progress(live.request, [], reason, error), None)

    def _end_all(self, reason: FinishReason, error: str | None) -> None:
        self._take_inbox()
        for live in list(self._live.values()):
            self._end(live, reason, error)

    def _deliver(self, progress: Progress, logprobs: list[TokenLogprobs] | None) -> None:
        request, tokens, finish, error = progress
        live = self._live[request.id]
        self._count(live, len(tokens), finish)
        if finish is not None:
            del self._live[request.id]
            with self._wake:
                self._known.discard(request.id)
        if not live.tell(tokens, logprobs, finish, error):
            self.abort(request.id)

    def _count(self, live: Live, tokens: int, finish: FinishReason | None) -> None:
        now, c, request = time.monotonic(), self._counters, live.request
        c.output_tokens += tokens
        if tokens and live.last_token is None:
            c.prompt_tokens += request.prompt_tokens
            c.time_to_first_token.add(now - request.arrival)
        elif tokens:
            c.time_between_tokens.add((now - live.last_token) / tokens, tokens)
        if tokens:
            live.last_token = now
        if finish is not None:
            c.finished[finish] += 1
            c.time_of_request.add(now - request.arrival)

    def _serve(self) -> None:
        """Step while there is work, sleep while there is none, end when told."""
        try:
            while self._wait_for_work():
                with self.executor.watch.step("turn"):
                    self.step()
            self._end_all("abort", None)
        except BaseException as error:  # whatever ends this thread, everybody who waits has to be told
            self.fail(last_words(error))
            self._live.clear()
            self._inbox.clear()

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not self._inbox and self.scheduler.idle and self._deadline is None:
                if self.tiers is not None and self.tiers.busy:
                    return True  # what is being stored has to be let go
                self._wake.wait()
            if self._deadline is None:
                return True
            idle = not self._inbox and self.scheduler.idle
            return not idle and time.monotonic() < self._deadline

    def fail(self, reason: str, finish: FinishReason = "error") -> None:
        """Take nothing more and tell everybody, without touching the books. Thread-safe: the engine thread
        may be stuck in its step; if it wakes up, it ends and nobody is told twice.
        """
        self._counters.last_error = reason if finish == "error" else self._counters.last_error
        with self._wake:
            self._closed, self._deadline = reason, 0.0
            waiting = [item for item in (*self._inbox, *self._taken) if isinstance(item, Live)]
            self._wake.notify_all()
        for live in [*self._live.copy().values(), *waiting]:
            live.tell([], None, finish, reason)


def result_of(work: Work, choice: Choice | None) -> Result:
    """A piece of work's part of the step: nothing for a chunk inside the prompt."""
    if choice is None:
        return Result(work)
    return Result(work, error=choice.error) if choice.error else Result(work, choice.tokens)
