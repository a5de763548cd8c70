"""A thread that says twice a second that this rank lives, and hears who else does, through a store.

    sign/0   {"count": 17, "doing": "run", ...}      written by rank 0, read by all
    trouble  "-", then what the first to notice said
    ask      "-", then "?": every rank puts its list of collectives under list/<rank>

It has a connection of its own, on which nobody else waits. A store that does not answer blocks this thread
and no other: who decides (watch.py) only looks at what was heard last.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist

from .processes import Identity
from .recorder import Entry

log = logging.getLogger(__name__)

BEAT_S = 0.5
QUIET = "-"
TROUBLE, ASK = "trouble", "ask"
WAS_INTERRUPTED = "was interrupted"  # how the trouble reads when somebody wants all ranks to end
IDLE, BYE, ENDING = "idle", "bye", "ending"  # what a rank may be doing, besides its steps


class Sign(NamedTuple):
    """What a rank said last. doing: kind of its step, or one of the words above."""

    count: int
    doing: str
    who: Identity


class Beats:
    """The signs of ``size`` ranks in ``store``, which no other thread may use.

    doing: what this rank does, in a word. entries: its last collectives.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        who: Identity,
        doing: Callable[[], str],
        entries: Callable[[], list[Entry]],
    ) -> None:
        self.rank, self.size = rank, size
        self.signs: list[Sign | None] = [None] * size  # of every rank; None: not heard yet
        self.trouble: str | None = None  # what some rank said first
        self.lost: str | None = None  # why the store cannot be asked any more
        self.rounds = 0
        self.lists: dict[int, list[Entry]] = {}
        self._store, self._who, self._doing, self._entries = store, who, doing, entries
        self._shout: str | None = None
        self._asked = self._published = False
        self._ended = False
        self._hurry = threading.Event()
        self._round_over = threading.Condition()
        self._thread = threading.Thread(target=self._beat, name="k3-beats", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def shout(self, trouble: str) -> None:
        """Tell every rank of a trouble, unless another one was first. Thread-safe."""
        self._shout = trouble
        self._hurry.set()

    def ask_lists(self) -> None:
        """Have every rank publish its list of collectives, to be found in ``lists``. Thread-safe."""
        self._asked = True
        self._hurry.set()

    def hurry(self) -> None:
        """Do not wait for the next round. Thread-safe."""
        self._hurry.set()

    def stop(self, wait_s: float) -> None:
        """Say a last time what this rank is doing, then no more."""
        self._ended = True
        self._hurry.set()
        self._thread.join(wait_s)

    def wait(self, wait_s: float, until: Callable[[], bool]) -> bool:
        """Wait for what is heard to be so; whether it is."""
        with self._round_over:
            return self._round_over.wait_for(until, wait_s)

    def _beat(self) -> None:
        try:
            self._begin()
            while True:
                last = self._ended
                self._round()
                with self._round_over:
                    self.rounds += 1
                    self._round_over.notify_all()
                if last:
                    return
                self._hurry.wait(BEAT_S)
                self._hurry.clear()
        except RuntimeError as error:  # of the store, whatever its kind
            self.lost = str(error).splitlines()[0]
            with self._round_over:
                self._round_over.notify_all()

    def _begin(self) -> None:
        """So that every key can be read without waiting."""
        for key in (TROUBLE, ASK, *(f"sign/{r}" for r in range(self.size))):
            self._store.compare_set(key, "", QUIET)

    def _round(self) -> None:
        count = self.rounds + 1
        mine = {"count": count, "doing": self._doing(), **self._who._asdict()}
        self._store.set(f"sign/{self.rank}", json.dumps(mine))
        if self._shout is not None:
            self._store.compare_set(TROUBLE, QUIET, self._shout)
        if self._asked:
            self._store.compare_set(ASK, QUIET, "?")
        keys = [TROUBLE, ASK, *(f"sign/{r}" for r in range(self.size))]
        trouble, ask, *signs = (value.decode() for value in self._store.multi_get(keys))
        self.signs = [None if text == QUIET else sign_of(json.loads(text)) for text in signs]
        if trouble != QUIET:
            self.trouble = trouble
        if ask != QUIET:
            self._exchange_lists()

    def _exchange_lists(self) -> None:
        if not self._published:
            self._store.set(f"list/{self.rank}", json.dumps(self._entries()))
            self._published = True
        for rank in range(self.size):
            if rank not in self.lists and self._store.check([f"list/{rank}"]):
                told = json.loads(self._store.get(f"list/{rank}"))
                self.lists[rank] = [Entry(place, text) for place, text in told]


def sign_of(said: dict) -> Sign:
    return Sign(said["count"], said["doing"], Identity(said["host"], said["pid"], said["start"]))
