"""An engine without a model: it answers by a script, in blocks, on a thread of its own.

It ends requests by the same rule as the real one (``request.cut``) and refuses what the real one refuses,
so that the server can be tested for every order of events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from k3compile.runtime.engine import EngineClosed, QueueFull, Update
from k3compile.runtime.request import Request, cut
from k3compile.runtime.sampler import TokenLogprobs
from k3compile.runtime.stats import BETWEEN_BOUNDS, EngineStats, Histogram

Script = Callable[[Request], Sequence[int]]


class FakeEngine:
    """script: the tokens a request would get without limits. block: tokens of an update.

    With ``manual`` nothing happens until :meth:`turn` is called; otherwise a thread turns.
    """

    def __init__(
        self,
        script: Script,
        *,
        block: int = 1,
        vocab_size: int = 1024,
        max_model_len: int = 2048,
        max_waiting: int = 64,
        eos: int | None = None,
        manual: bool = False,
        pause_s: float = 0.0,
    ):
        self.script, self.block, self.pause_s = script, block, pause_s
        self.vocab_size, self.max_model_len, self.max_waiting = vocab_size, max_model_len, max_waiting
        self.eos = frozenset([vocab_size - 256 + 2 if eos is None else eos])
        self.live: dict[str, tuple[Request, list[int], Callable]] = {}
        self.seen: list[Request] = []
        self.aborted: list[str] = []
        self.reasons: list[str] = []  # of those aborted
        self.fail_next: str | None = None  # error of the next update
        self.current_step_s = 0.0
        self.more_stats: dict = {}  # further fields of EngineStats
        self.cached_tokens = 0  # of every update
        self.last_error: str | None = None
        self.alive = True
        self._lock = threading.Condition()
        if not manual:
            threading.Thread(target=self._work, daemon=True).start()

    def submit(self, request: Request, on_update: Callable[[Update], None]) -> None:
        if not 0 <= min(request.tokens) <= max(request.tokens) < self.vocab_size:
            raise ValueError("prompt holds a token id outside the vocabulary")
        request.params.check_vocabulary(self.vocab_size)
        with self._lock:
            if not self.alive:
                raise EngineClosed("the engine is stopping")
            if len(self.live) >= self.max_waiting:
                raise QueueFull(f"{len(self.live)} requests wait")
            assert request.id not in self.live
            self.seen.append(request)
            self.live[request.id] = (request, list(self.script(request)), on_update)
            self._lock.notify_all()

    def abort(self, request_id: str, reason: str = "abort") -> None:
        with self._lock:
            entry = self.live.pop(request_id, None)
            if entry is None:
                return
            self.aborted.append(request_id)
            self.reasons.append(reason)
            entry[2](self._update(entry[0], [], reason, None))

    def turn(self) -> bool:
        """One step: every live request gets a block. False when none lives."""
        with self._lock:
            for request, script, on_update in list(self.live.values()):
                error, self.fail_next = self.fail_next, None
                block, script[: self.block] = script[: self.block], []
                if error:
                    tokens, finish = [], "error"
                else:
                    tokens, finish = cut(request, block or [0], self.eos, self.max_model_len)
                request.tokens.extend(tokens)
                if finish:
                    del self.live[request.id]
                on_update(self._update(request, tokens, finish, error))
            return bool(self.live)

    def _update(self, request: Request, tokens: list[int], finish: str | None, error: str | None) -> Update:
        wanted = request.params.logprobs
        logprobs = None
        if wanted is not None:
            logprobs = [
                TokenLogprobs(t, -0.5, tuple((t if i == 0 else i, -0.5 - i) for i in range(wanted)))
                for t in tokens
            ]
        return Update(
            request.id,
            tokens,
            logprobs,
            finish,
            error,
            request.prompt_tokens,
            request.output_tokens,
            self.cached_tokens,
        )

    def _work(self) -> None:
        while True:
            with self._lock:
                while not self.live:
                    self._lock.wait()
            self.turn()
            threading.Event().wait(self.pause_s)

    def start(self) -> None: ...

    def stop(self, drain_s: float = 0.0) -> None:
        self.alive = False
        for request_id in list(self.live):
            self.abort(request_id)

    def fail(self, reason: str, finish: str = "error") -> None:
        """Tell everybody, whatever a step is doing."""
        for request, _, on_update in list(self.live.values()):
            on_update(self._update(request, [], finish, reason))
        self.live.clear()

    def stats(self) -> EngineStats:
        times = Histogram(BETWEEN_BOUNDS)
        times.add(0.003, 2)
        return EngineStats(
            running=len(self.live),
            waiting=0,
            pages_used=1,
            pages_total=4,
            slots_used=len(self.live),
            slots_total=16,
            steps=7,
            rows=70,
            prompt_tokens=50,
            output_tokens=20,
            preemptions=1,
            finished={"stop": 3},
            failed_steps=0,
            last_error=self.last_error,
            current_step_s=self.current_step_s,
            time_to_first_token=times.snapshot(),
            time_between_tokens=times.snapshot(),
            time_of_request=times.snapshot(),
            **self.more_stats,
        )
