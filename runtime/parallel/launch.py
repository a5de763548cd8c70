"""From torchrun's environment to ranks that have met: seat, store, agreement, process group.

    torchrun --nproc-per-node 8 ...      RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT, in each process
         |
    seat()    which of the processes this is
    meet()    a store, through which they compare what they are about to serve (agreement.py)
    join()    gloo or NCCL: from here on there are collectives

torchrun's own rendezvous brings several machines together; nothing here knows how many there are.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from .agreement import PATIENCE_S, Apart, Meeting
from .ranks import Ranks, world
from .store import NoStore, connect

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # what torchrun passes on to every rank
NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
MOST_PORT = 65535


class Seat(NamedTuple):
    """A process that a launcher started: ``rank`` of ``size``, ``local`` on its machine.

    host, port: of the store. keeps: whether this process has to keep the store, as no launcher does. attempt:
    how often the launcher started it all again.
    """

    rank: int
    size: int
    local: int
    host: str
    port: int
    keeps: bool
    attempt: int


def seat(environ: Mapping[str, str] | None = None) -> Seat | None:
    """What torchrun says; None where no launcher started this process.

    Raises ValueError for half an environment, or one whose numbers cannot be: nothing else would notice them,
    and ranks would wait for one that does not exist.
    """
    environ = os.environ if environ is None else environ
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None
    if missing := [name for name in NEEDED if not environ.get(name)]:
        raise ValueError(f"{', '.join(missing)} not set beside RANK or WORLD_SIZE: start this with torchrun")
    try:
        rank, size, local = (int(environ[name]) for name in NEEDED[:3])
        port = int(environ["MASTER_PORT"])
        attempt = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    except ValueError as error:
        raise ValueError(f"the launcher's environment holds no number where one is needed: {error}") from None
    if size < 1 or not 0 <= rank < size:
        raise ValueError(
            f"RANK is {rank} and WORLD_SIZE {size}; allowed: a RANK of 0 to WORLD_SIZE - 1, another one "
            "for each process: start this with torchrun, which numbers them"
        )
    if local < 0:
        raise ValueError(f"LOCAL_RANK is {local}; allowed: 0 or more, the number of a process on its machine")
    if not 1 <= port <= MOST_PORT:
        raise ValueError(
            f"MASTER_PORT is {port}; allowed: 1 to {MOST_PORT}, a free port of rank 0's machine, "
            "the same for all ranks"
        )
    keeps = rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return Seat(rank, size, local, environ["MASTER_ADDR"], port, keeps, attempt)


def check(seat: Seat | None, tp: int, arguments: Sequence[str]) -> None:
    """Raise ValueError unless as many processes were started as ``tp`` asks for.

    arguments: this program and what it was given, for the command that would be right.
    """
    if tp < 1:
        raise ValueError(f"tp is {tp}: give the number of ranks, 1 or more")
    size = seat.size if seat is not None else 1
    if tp == size:
        return
    if seat is None:
        command = f"torchrun --standalone --nproc-per-node {tp} {shlex.join(arguments)}"
        raise ValueError(f"tp is {tp}, and this is one process. Start {tp} of them:\n{command}")
    raise ValueError(
        f"tp is {tp}, but the launcher started {size} process{'es' if size > 1 else ''}: "
        f"give --tp {size}, or start {tp} (torchrun --nproc-per-node, times --nnodes)"
    )


def meet(seat: Seat, patience_s: float = PATIENCE_S) -> Meeting:
    """Where the ranks talk before there is a process group; this one's seat there is taken.

    Raises :class:`Apart` when nobody answers, or another process has the seat.
    """
    try:
        store = connect(seat.host, seat.port, seat.keeps, patience_s)
    except NoStore as error:
        raise Apart(str(error)) from None
    meeting = Meeting(dist.PrefixStore(f"k3/{seat.attempt}", store), seat.rank, seat.size, patience_s)
    meeting.claim()
    return meeting


def join(seat: Seat, meeting: Meeting, device: torch.device, context: int = 1) -> Ranks:
    """Make the process group, and the context groups of ``context`` ranks. Every rank must call it."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("group", meeting.store),
        rank=seat.rank,
        world_size=seat.size,
        device_id=device if on_gpu else None,
    )
    return world(context)


def device_of(seat: Seat | None, kind: str = "cpu") -> torch.device:
    """This rank's device of a kind. Raises ValueError where a machine has more ranks than GPUs."""
    if kind != "cuda":
        return torch.device(kind)
    local, count = seat.local if seat else 0, torch.cuda.device_count()
    if local >= count:
        raise ValueError(f"LOCAL_RANK is {local}, and this machine has {count} GPUs: each rank needs its own")
    return torch.device(kind, local)


@contextmanager
def deaf() -> Iterator[None]:
    """Inside, SIGTERM, SIGINT and SIGHUP do nothing: torchrun sends them to every rank at once, and rank 0
    needs the others until the answers that run have ended. They end when it says so, or when it is gone.
    """
    before = {sig: signal.signal(sig, signal.SIG_IGN) for sig in ENDING}
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)


@contextmanager
def on_interrupt(
    end: Callable[[], NoReturn], give_up: Callable[[], NoReturn], after_s: float
) -> Iterator[None]:
    """Inside, SIGINT calls ``end`` instead of raising KeyboardInterrupt, and once that has taken ``after_s``
    seconds, ``give_up``. Both have to end the process, and neither runs on the main thread: that one hears
    of signals between two lines of Python, and a compiler or an import may be seconds away from the next.
    """
    heard, told = socket.socketpair()
    told.setblocking(False)

    def listen() -> None:
        with heard:
            while number := heard.recv(1):
                if number[0] == signal.SIGINT:  # the first: a terminal and its launcher each send one
                    timer = threading.Timer(after_s, give_up)
                    timer.daemon = True
                    timer.start()
                    return end()

    threading.Thread(target=listen, name="k3-interrupt", daemon=True).start()
    before = signal.signal(signal.SIGINT, lambda *_: None)  # a handler, or nothing is written to ``told``
    before_fd = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before_fd)
        signal.signal(signal.SIGINT, before)
        told.close()
