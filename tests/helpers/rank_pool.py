"""Ranks as processes that are started once and then do many jobs, one after the other, over gloo.

    with RankPool(4) as pool:                 four processes in one process group
        answers = pool.run(job, *arguments)   job(*arguments) on each, what it returned by rank

A job is a function of a module that can be imported: it may use the default process group, and finds in a
rank's memory what earlier jobs left in their modules. Processes are forked from a server that has imported
what all of them need, so that eight of them start in the time of one. None outlives the test process: each
watches it, and ends with it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

NEEDED = ("torch", "k3compile.forward", "k3compile.runtime.make_engine", "k3compile.cli.loading")
START_S, JOB_S, END_S = 120.0, 240.0, 10.0
LOOK_S = 0.5  # between two looks at whether the test process lives


class RankFailed(RuntimeError):
    """A job raised on some ranks, or was not done in time; the text has what each of them said last."""


class RankPool:
    """``ranks`` processes, rank 0 to ranks - 1. A pool in which a job failed is closed: its ranks may stand
    anywhere.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(NEEDED))  # before the first pool of a process
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            arguments = (rank, ranks, theirs, f"{self._folder.name}/store", os.getpid())
            process = context.Process(target=serve_jobs, args=arguments, name=f"rank-{rank}", daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers("starting", START_S)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Of the processes, by rank."""
        return [process.pid for process in self._processes]

    @property
    def closed(self) -> bool:
        return not self._pipes

    def run(self, job: Callable[..., Any], *arguments: Any, timeout_s: float = JOB_S) -> list[Any]:
        """What ``job(*arguments)`` returned by rank. Raises :class:`RankFailed`, and closes the pool."""
        assert not self.closed, "a job failed before, or the pool was closed"
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((job, arguments))
            except OSError:
                self._fail(f"rank {rank} had ended before {job.__name__}", {})
        return self._answers(job.__name__, timeout_s)

    def _answers(self, what: str, timeout_s: float) -> list[Any]:
        """One answer of each rank; as soon as one fails, the others get a second to say why they do too."""
        until = time.monotonic() + timeout_s
        left, got, wrong = dict(enumerate(self._pipes)), {}, {}
        while left and (seconds := until - time.monotonic()) > 0:
            ready = wait(list(left.values()), seconds)
            for rank in [rank for rank, pipe in left.items() if pipe in ready]:
                try:
                    done, answer = left.pop(rank).recv()
                except (EOFError, ConnectionError):
                    done, answer = False, f"ended with exit code {self._exit_code(rank)}"
                (got if done else wrong)[rank] = answer
            if wrong:
                until = min(until, time.monotonic() + 1.0)
        if wrong or left:
            late = f"; {sorted(left)} not done" if left else ""
            self._fail(f"{what} failed on ranks {sorted(wrong)} of {self.ranks}{late}", wrong)
        return [got[rank] for rank in range(self.ranks)]

    def _exit_code(self, rank: int) -> int | None:
        self._processes[rank].join(1)
        return self._processes[rank].exitcode

    def _fail(self, what: str, said: dict[int, str]) -> None:
        self.close(grace_s=0.0)
        raise RankFailed("\n".join([what, *(f"rank {rank}: {text}" for rank, text in sorted(said.items()))]))

    def close(self, grace_s: float = END_S) -> None:
        """End all processes, by force after ``grace_s`` seconds. A second call does nothing."""
        for pipe in self._pipes:
            pipe.close()
        self._pipes = []
        until = time.monotonic() + grace_s
        for process in self._processes:
            process.join(max(until - time.monotonic(), 0.0))
            if process.is_alive():
                process.kill()
                process.join()
        self._processes = []
        self._folder.cleanup()


def serve_jobs(rank: int, ranks: int, pipe: Connection, store: str, parent: int) -> None:
    """A rank's process: join the group, then do what comes until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the test process's, which then closes the pool
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
        pipe.send((True, None))
    except Exception:
        pipe.send((False, traceback.format_exc()))
        return
    with suppress(EOFError, ConnectionError):
        while True:
            asked = pipe.recv_bytes()
            try:
                job, arguments = pickle.loads(asked)
                answer = True, job(*arguments)
            except Exception:
                answer = False, traceback.format_exc()
            pipe.send(answer)
    os._exit(0)  # the others may be gone already: there is nobody to say goodbye to


def end_with(parent: int) -> None:
    """End this process when ``parent`` has ended, however deep it is in a collective."""
    while alive(parent):
        time.sleep(LOOK_S)
    os._exit(1)


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be buried does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
