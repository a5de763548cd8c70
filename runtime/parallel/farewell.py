"""How a rank ends: in peace when it was told to, together with all others when something is wrong.

    rank 0    tell requests ... 1.5 s for their events to be sent ... end those that stand still, exit 1
    others    wait for rank 0 to be through ........................ end those that stand still, exit 1

torchrun sends SIGTERM to the rest as soon as one has ended, and waits half a minute for those that do not
obey. A process that stands still cannot, so it is ended here, by a handle that means no other one.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from .beats import BYE, ENDING, WAS_INTERRUPTED, Beats
from .divergence import parting
from .patience import Silence
from .processes import Process

log = logging.getLogger(__name__)

LAST_WORDS_S = 1.5  # for the requests' last events to be sent
FOLLOWERS_S = 2 * LAST_WORDS_S  # for rank 0 to be through with them
INTERRUPTED = 130  # exit code of what SIGINT ended, as a shell has it
HARD_S = 4.0  # after which a process ends, whatever its threads are doing
STANDS_STILL_S = 2.5  # without a sign of life while the store answers, when all should be about to end
POLL_S = 0.05


class Farewell:
    """The end of this rank. processes: those of other ranks on this machine. silences: of each rank. end:
    ends this process with a code.
    """

    def __init__(
        self,
        rank: int,
        beats: Beats,
        processes: Mapping[int, Process | None],
        silences: Sequence[Silence],
        end: Callable[[int], None] | None = None,
    ) -> None:
        self._rank, self._beats, self._processes, self._silences = rank, beats, processes, silences
        self._end = end or end_process

    def in_trouble(
        self, trouble: str, tells: Sequence[Callable[[str], None]], details: Sequence[str] = ()
    ) -> None:
        """Tell everybody, leave nobody behind, end with code 1, or as SIGINT does where that is the trouble.
        details: for this rank's log alone.
        """
        wanted = trouble.endswith(WAS_INTERRUPTED)
        code = INTERRUPTED if wanted else 1
        hard = threading.Timer(HARD_S, self._end, (code,))
        hard.daemon = True
        hard.start()
        if wanted:
            log.warning("%s. All ranks end", trouble)
        else:
            log.error("%s. All ranks end: what they hold cannot be made whole, start them again", trouble)
        for detail in details:
            log.error("as this rank saw it: %s", detail)
        for tell in tells:
            tell(trouble.splitlines()[0])  # lists of collectives are for the log
        self._beats.shout(trouble)
        self._beats.ask_lists()
        self._last_words()
        if self._rank == 0 and "\n" not in trouble and (text := parting(self._beats.lists)):
            log.error("%s", text)
        for rank, process in self._processes.items():
            if process is not None and process.alive and self._needs_help(rank):
                log.error("rank %d cannot end itself: killing its process", rank)
                process.kill()
        hard.cancel()
        self._end(code)

    def _last_words(self) -> None:
        """Wait as long as this rank should, and go on measuring how long the others are silent."""
        leader = self._processes.get(0)
        until = time.monotonic() + (LAST_WORDS_S if self._rank == 0 else FOLLOWERS_S)
        while (now := time.monotonic()) < until:
            for silence, sign in zip(self._silences, self._beats.signs):
                silence.look(sign and sign.count, self._beats.rounds, now)
            if self._rank and (leader is None or not leader.alive or self._needs_help(0)):
                break
            self._beats.hurry()
            time.sleep(POLL_S)

    def _needs_help(self, rank: int) -> bool:
        """Whether a rank will not end by itself. Only rank 0 ends those that merely have not heard yet, since
        it is the one that the others wait for.
        """
        sign = self._beats.signs[rank]
        if self._silences[rank].seconds > STANDS_STILL_S:
            return True
        return self._rank == 0 and (sign is None or sign.doing not in (BYE, ENDING))

    def in_peace(self, wait_s: float) -> bool:
        """Wait for the others to end; kill those that do not. Whether there were none."""
        left = {rank: one for rank, one in self._processes.items() if one is not None}
        until = time.monotonic() + wait_s
        while left := {rank: one for rank, one in left.items() if one.alive}:
            if time.monotonic() > until:
                break
            time.sleep(POLL_S)
        for rank, process in left.items():
            log.error("rank %d was told to end and did not: killing its process", rank)
            process.kill()
        return not left


def end_process(code: int) -> None:
    """End it here: its threads may be stuck, and nothing of them is needed any more."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
