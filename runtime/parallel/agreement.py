"""What the ranks tell each other before the first collective: what each is about to serve, and how far it is.

    rank 0  settings/0 {...} --+                                        +--> all equal: go on
    rank 1  settings/1 {...} --+--> store --> every rank reads them all +--> a difference: one error, on each
    rank 2  (never came)                                                +--> after a while: who is missing

Ranks that differ would hang in a collective, or compute a model that nobody has. So they meet in a key-value
store first, where any two processes can talk, and end together with the same message if they must. A rank
that fails later, while it loads, is heard by the others at once: they look whenever they report progress.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

import torch.distributed as dist

from .waiting import Waiting

PATIENCE_S = 300.0  # for a rank that shows no sign of life; eight processes share two cores while they start
POLL_S = 0.05
PROGRESS_S = 0.5  # between two reports of progress
GOODBYE_S = 5.0  # for the others to read why we end
LAST_S = 1.0  # for rank 0 to see that the others have read it
SHOWN = 60  # differences in the text of an error; the attribute holds all
TROUBLE, ABSENT = "trouble", "nothing"


class Apart(ValueError):
    """The ranks cannot serve together: what every one of them ends with."""


class Disagreement(Apart):
    """Ranks were started differently; ``differences`` lists every one."""

    def __init__(self, found: Sequence[str]) -> None:
        self.differences = list(found)
        more = [f"... and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
        super().__init__("\n  ".join(["the ranks differ:", *found[:SHOWN], *more]))


class Meeting:
    """This rank among ``size`` that meet in ``store``. Every rank makes the same calls in the same order.

    patience_s: seconds without a sign of life after which a rank counts as missing.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, patience_s: float = PATIENCE_S) -> None:
        self.store, self.rank, self.size, self.patience_s = store, rank, size, patience_s
        self._last_look = 0.0

    def claim(self) -> None:
        """Take this rank's seat. Raises :class:`Apart` where another process has it. Only this one ends then:
        the others may have gone on, and wait for nobody if they are as many as they should be.
        """
        mine = json.dumps([f"process {os.getpid()} on {socket.gethostname()}", uuid.uuid4().hex])
        holds = self._call(self.store.compare_set, f"seat/{self.rank}", "", mine).decode()
        if holds != mine:
            first, second = json.loads(holds)[0], json.loads(mine)[0]
            raise Apart(
                f"two processes say that they are RANK {self.rank}: {first}, which was first, and {second}, "
                f"which ends; give each its own, 0 to {self.size - 1}, and start all of them again"
            )

    def agree(self, mine: Mapping[str, Any], stage: str = "settings") -> None:
        """Compare ``mine``, a mapping that may nest, with what every other rank has at this stage.

        Raises :class:`Disagreement` on all of them; :class:`Apart` for a rank that did not come or failed.
        """
        if found := differences(self.exchange(stage, flat(mine))):
            self._leave()
            raise Disagreement(found)

    def reached(self, stage: str, fact: Any = None) -> list[Any]:
        """Wait until every rank has got as far; -> what each had to say of it, which JSON must hold.

        Raises :class:`Apart` with the problem of a rank that failed on the way.
        """
        return self.exchange(stage, fact)

    def exchange(self, stage: str, value: Any) -> list[Any]:
        """Every rank's value, rank 0's first."""
        self._put(f"{stage}/{self.rank}", value)
        missing, signs, waiting = list(range(self.size)), {}, Waiting(self.patience_s)
        while missing := [r for r in missing if not self._has(f"{stage}/{r}")]:
            self._look()
            if (now := {r: self._get(f"progress/{r}") for r in missing}) != signs:
                signs = now
                waiting.restart()
            if self.rank == min(set(range(self.size)) - set(missing)):  # of many that wait one says so
                waiting.say(lambda: f"{named(missing)} at {stage!r}")
            if waiting.over:
                self._leave()
                late = f"{named(missing)} of {self.size} did not get to {stage!r} in {self.patience_s:g} s"
                raise Apart(f"{late}: see what became of {'it' if len(missing) == 1 else 'them'}")
            time.sleep(POLL_S)
        return [self._get(f"{stage}/{r}") for r in range(self.size)]

    def progress(self, done: int, total: int) -> tuple[int, int] | None:
        """Say how far this rank is; -> (done, total) of the slowest, None when it is too soon to ask again.

        Raises :class:`Apart` when another rank has failed.
        """
        if done < total and time.monotonic() - self._last_look < PROGRESS_S:
            return None
        self._put(f"progress/{self.rank}", (done, total))
        self._look()
        self._last_look = time.monotonic()
        told = [self._get(f"progress/{r}") or (0, 1) for r in range(self.size)]
        done, total = min(told, key=lambda one: one[0] / max(one[1], 1))
        return done, total

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Whatever ends this rank inside is told to the others, which then end with it."""
        try:
            yield
        except Apart:
            raise  # they know
        except BaseException as error:
            self.tell(str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
            raise

    def tell(self, trouble: str, wait_s: float | None = None) -> None:
        """Let the others know why this rank ends, and wait a moment for them to hear it; the first counts."""
        with suppress(Apart):
            self._call(self.store.compare_set, TROUBLE, "", json.dumps([self.rank, trouble]))
        self._leave(wait_s)

    def _look(self) -> None:
        """Raise :class:`Apart` when another rank has failed; the first to fail is heard."""
        trouble = self._get(TROUBLE)
        if trouble is not None and trouble[0] != self.rank:
            self._leave()
            raise Apart(f"rank {trouble[0]} ended: {trouble[1]}")

    def _leave(self, wait_s: float | None = None) -> None:
        """Wait a moment until everybody is about to leave, since a launcher ends the rest when the first one
        goes. Rank 0, whose process may keep the store, waits until the others ask no more of it: torch tells
        of a store that goes while it is asked in thirty lines.
        """
        everybody, others = range(self.size), range(1, self.size)
        deadline = time.monotonic() + (GOODBYE_S if wait_s is None else wait_s)
        with suppress(Apart):  # the store has gone, and with it whoever could have read this
            self._put(f"leaves/{self.rank}", True)
            self._wait_for([f"leaves/{r}" for r in everybody], deadline)
            if self.rank:
                self._put(f"left/{self.rank}", True)
            else:
                self._wait_for([f"left/{r}" for r in others], max(deadline, time.monotonic() + LAST_S))

    def _wait_for(self, keys: Sequence[str], deadline: float) -> None:
        while time.monotonic() < deadline and not self._call(self.store.check, list(keys)):
            time.sleep(POLL_S)

    def _put(self, key: str, value: Any) -> None:
        self._call(self.store.set, key, json.dumps(value, default=str))

    def _has(self, key: str) -> bool:
        return self._call(self.store.check, [key])

    def _get(self, key: str) -> Any:
        """What stands under a key, None where nothing does."""
        return json.loads(self._call(self.store.get, key)) if self._has(key) else None

    def _call(self, ask: Callable[..., Any], *words: Any) -> Any:
        """Ask the store. Raises :class:`Apart` when it has gone with the process that kept it."""
        try:
            return ask(*words)
        except RuntimeError as error:
            raise Apart(f"the store in which the ranks meet is gone, its process ended: {error}") from None


def flat(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` -> ``{"a.b": 1}``: a difference has the name of one setting."""
    out: dict[str, Any] = {}
    for name, value in facts.items():
        out |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return out


def differences(statements: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each name whose value is not the same in all statements, of rank 0, 1 and so on."""
    found = []
    for name in dict.fromkeys(name for one in statements for name in one):
        having: dict[str, list[int]] = {}
        for rank, one in enumerate(statements):
            text = json.dumps(one[name], sort_keys=True) if name in one else ABSENT
            having.setdefault(text, []).append(rank)
        if len(having) > 1:
            found.append(f"{name}: " + " and ".join(f"{text} on {named(r)}" for text, r in having.items()))
    return found


def named(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0, 2-7``."""
    ordered = sorted(ranks)
    breaks = [i for i, (a, b) in enumerate(pairwise(ordered), 1) if b != a + 1]
    runs = [ordered[a:b] for a, b in pairwise([0, *breaks, len(ordered)])]
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {', '.join(parts)}"
