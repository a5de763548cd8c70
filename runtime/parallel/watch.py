"""Notices on every rank that another one, or this one, does not go on, and ends them all.

    killed     its process is gone                              within a second or two
    cut off    a collective fails, and no other reason shows    WHY_S
    stopped    no sign of life while the store answers          silence_s
    no store   it does not answer, nobody is blamed for it      STORE_S
    slow       a step that does not end                         step_deadline_s
    diverged   other collectives than rank 0                    at the next command, or as a step that hangs

A collective that is half done cannot be taken back, and what each rank holds is then not known. So the ranks
fail together, and whoever started them starts them again. Two threads: one talks to the store (beats.py), the
other looks at what was heard, at the clock and at the processes, and decides. Neither needs the thread that
serves, which may be stuck for ever in a collective.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from .beats import BEAT_S, BYE, ENDING, IDLE, Beats, Sign
from .breakage import UNKNOWN, broke_off, in_words
from .divergence import Diverged, compare
from .farewell import Farewell
from .patience import Allowance, Silence, Stopwatch
from .processes import Identity, Process, find, identity
from .recorder import Mark, Recorder
from .watch_config import WatchConfig

LOOK_S = 0.1
LONG = ("load", "compile")  # what a rank may do for minutes
PATIENT = 4.0  # times the silence, while a rank does one of these: it may keep Python to itself
STORE_S = 60.0  # for the store to answer
LISTS_S = 3.0  # for rank 0 to say which collectives it made
MEET_S = 10.0  # for the others to be heard a first time
WHY_S = 1.0  # to find out why a collective broke off
CLOSE_S = 5.0  # for the others to end when they were told to


@dataclass
class Doing:
    """A step. rows: its token rows, as soon as they are known; number: tells it from every other."""

    kind: str
    rows: int
    number: int


class Watch:
    """This rank's watch over all ``size`` of them; beats from :meth:`start` to :meth:`close`.

    store: a store of this start of the job, a connection for the watch alone: ``dist.PrefixStore("watch",
    store.clone())``. recorder: hears this rank's collectives. who: this process. end: ends it with a code.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        config: WatchConfig | None = None,
        recorder: Recorder | None = None,
        *,
        who: Identity | None = None,
        end: Callable[[int], None] | None = None,
    ) -> None:
        self.rank, self.size, self.config = rank, size, config or WatchConfig()
        self.recorder = recorder or Recorder()
        self.trouble: str | None = None  # why the job ends
        self._allowance = Allowance(self.config.step_deadline_s)
        self._doing: Doing | None = None
        self._numbers = itertools.count(1)
        self._leaving = threading.Event()
        self._reported: str | None = None
        self._tells: list[Callable[[str], None]] = []
        who = who or identity()
        self._beats = Beats(store, rank, size, who, self._in_a_word, self.recorder.entries)
        self._processes: dict[int, Process | None] = {}
        self._gone: dict[int, int] = {}  # rank -> rounds heard when its process was found to have ended
        self._silences = [Silence() for _ in range(size)]
        self._step_time, self._store_time, self._left_time = Stopwatch(), Stopwatch(), Stopwatch()
        self._broke_time = Stopwatch()
        self._decided = threading.Event()  # trouble is known
        self._farewell = Farewell(rank, self._beats, self._processes, self._silences, end)
        self._thread = threading.Thread(target=self._guard, name="k3-watch", daemon=True)

    def start(self) -> None:
        """Begin to beat and to look; returns when every rank was heard, so that none can be lost unseen, or
        after a few seconds. Every rank has to start then.
        """
        self._beats.start()
        self._thread.start()
        until = time.monotonic() + MEET_S
        while len(self._processes) < self.size - 1 and time.monotonic() < until and self.trouble is None:
            self._beats.hurry()
            time.sleep(LOOK_S / 2)

    def on_trouble(self, tell: Callable[[str], None]) -> None:
        """Call ``tell(reason)`` once if the job ends, on a thread of the watch; it must not wait long."""
        self._tells.append(tell)

    @contextmanager
    def step(self, kind: str, rows: int = 0) -> Iterator[None]:
        """Inside, the deadline of this kind of step runs; inside another step, that one's goes on. rows: of
        tokens, as the deadline is measured by. "load" and "compile" may be long. An error in any other kind
        ends all ranks.
        """
        outer, start = self._doing, time.monotonic()
        if outer is None:
            self._doing = Doing(kind, rows, next(self._numbers))
        else:
            outer.rows = max(outer.rows, rows)
        doing = self._doing
        try:
            yield
        except BaseException as error:
            if kind not in LONG:
                self.report(f"{kind} failed on rank {self.rank}: {in_words(error)}")
            raise
        else:
            if outer is None and kind not in LONG:
                self._allowance.learn(doing.rows, time.monotonic() - start)
        finally:
            self._doing = outer

    def mark(self) -> Mark:
        """This rank's collectives so far."""
        return self.recorder.mark()

    def check(self, mine: Mark, leaders: Mark) -> None:
        """Raise :class:`Diverged` when this rank's mark is not rank 0's of the same moment."""
        if mine == leaders:
            return
        self._beats.ask_lists()
        self._beats.wait(LISTS_S, lambda: 0 in self._beats.lists or self._beats.lost is not None)
        try:
            compare(self.rank, mine, leaders, self.recorder.entries(), self._beats.lists.get(0))
        except Diverged as error:
            self.report(str(error))
            raise

    def report(self, trouble: str) -> None:
        """End the job, on all ranks. Thread-safe; the first trouble counts. One that is only a collective
        that broke off is for the log, and what is told is why, if that is found within a second.
        """
        self._reported = self._reported or trouble

    def why(self, error: Exception) -> str | None:
        """Why a step failed with an error that only says that a collective broke off, once that was found or
        given up; None for any other error. Not on a thread of the watch.
        """
        if not broke_off(in_words(error)):
            return None
        self._decided.wait(2 * WHY_S)
        return (self.trouble or UNKNOWN).splitlines()[0]

    def close(self) -> bool:
        """Leave in peace. On rank 0: wait a moment for the others, and end those of this machine that do not
        leave; False when there were any.
        """
        if self.trouble or self._reported or self._beats.trouble:
            self._thread.join()  # which ends the process
        self._leaving.set()
        self._thread.join()
        self._beats.stop(1.0)
        return self._farewell.in_peace(CLOSE_S) if self.rank == 0 else True

    def _in_a_word(self) -> str:
        if self.trouble is not None:
            return ENDING
        doing = self._doing
        return BYE if self._leaving.is_set() else doing.kind if doing else IDLE

    def _guard(self) -> None:
        while not self._leaving.wait(LOOK_S):
            if trouble := self._look(time.monotonic()):
                self.trouble = trouble + self._also_gone(trouble)
                self._decided.set()
                broke = self._reported if broke_off(self._reported) else None
                details = [said for said in (broke, self._beats.lost) if said is not None]
                self._farewell.in_trouble(self.trouble, self._tells, details)
                return

    def _ended(self) -> dict[int, Sign]:
        """Ranks whose processes have ended out of turn, and what they said last."""
        ended = [rank for rank, process in self._processes.items() if process and not process.alive]
        signs = {rank: sign for rank in ended if (sign := self._beats.signs[rank])}
        return {rank: sign for rank, sign in signs.items() if sign.doing not in (BYE, ENDING)}

    def _also_gone(self, trouble: str) -> str:
        """What an error here does not say: whose process has ended."""
        gone = [f"rank {rank}" for rank in self._ended()]
        if not gone or " has ended" in trouble:
            return ""
        return f" (the process of {', '.join(gone)} has ended)"

    def _look(self, now: float) -> str | None:
        """What is wrong, in words."""
        beats, broke = self._beats, broke_off(self._reported)
        if said := beats.trouble:
            return said
        if not broke and (said := self._reported or self._overdue(now)):
            return said
        for rank, sign in enumerate(beats.signs):
            if rank != self.rank and (said := self._missed(rank, sign, now)):
                return said
        if beats.lost is not None:
            return "the store is gone, and the launcher that keeps it"
        if self._store_time.look(beats.rounds, now) > STORE_S:
            return f"the store has not answered for {STORE_S:.0f} s: is the launcher stopped?"
        if broke and self._broke_time.look(broke, now) > WHY_S:
            gone = [gone_in_words(*one) for one in self._ended().items()]
            return ", ".join(gone) or f"a collective broke off on rank {self.rank}: {UNKNOWN}"
        return None

    def _overdue(self, now: float) -> str | None:
        """Whether this rank's own step should have ended."""
        doing = self._doing
        lasted = self._step_time.look(doing and doing.number, now)
        if doing is None:
            return None
        long = doing.kind in LONG
        allowed = self.config.load_deadline_s if long else self._allowance.of(doing.rows)
        if lasted <= allowed:
            return None
        flag = "load-deadline-s" if long else "step-deadline-s"
        last = self.recorder.entries()[-1:]
        where = f", last collective {last[0].place}: {last[0].text}" if last else ""
        return (
            f"{doing.kind} of {doing.rows} rows has taken {lasted:.1f} s on rank {self.rank}{where}: a rank "
            f"is stuck, or the deadline of {allowed:.0f} s (--{flag}) is too short for this machine"
        )

    def _missed(self, rank: int, sign: Sign | None, now: float) -> str | None:
        """Whether another rank has gone or stands still."""
        silent = self._silences[rank].look(sign and sign.count, self._beats.rounds, now)
        if sign is None:
            late = silent > PATIENT * self.config.silence_s
            return f"rank {rank} has given no sign of life at all" if late else None
        if sign.doing == BYE and rank == 0:
            left = self._left_time.look(BYE, now) > self.config.silence_s
            return "rank 0 has ended and this rank was not told to" if left else None
        if sign.doing in (BYE, ENDING):
            return None
        if rank not in self._processes:
            self._processes[rank] = find(sign.who)
        process = self._processes[rank]
        if process is not None and not process.alive:
            # Perhaps it said goodbye a moment before: hear the store out first.
            heard = self._gone.setdefault(rank, self._beats.rounds)
            self._beats.hurry()
            if self._beats.rounds > heard + 1:
                return gone_in_words(rank, sign)
            return None
        patience = self.config.silence_s * (PATIENT if sign.doing in LONG else 1.0)
        if silent > patience - BEAT_S:
            self._beats.hurry()  # so that it is not late by a round
        if silent > patience:
            return f"rank {rank} has given no sign of life for {silent:.1f} s ({sign.doing})"
        return None


def gone_in_words(rank: int, sign: Sign) -> str:
    return f"rank {rank} is gone: its process {sign.who.pid} has ended ({sign.doing})"
