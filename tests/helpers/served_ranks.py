"""`k3 serve` on several ranks as real processes, started by torchrun or by hand, ended whatever happens.

with ServedRanks(2, "--no-compile") as served:          torchrun starts them
with ServedRanks(2, by_hand=True, own={1: [..]}):       one process each, here rank 1 with more arguments
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "serve.py"
SMALL = ["--port", "0", "--max-model-len", "1024", "--max-num-seqs", "4", "--num-pages", "64"]
DEADLINE_S = 150.0  # for whatever a test waits for
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class ServedRanks:
    """The processes of one job. log: their lines, mixed; ``errors(rank)`` of one that was started by hand."""

    def __init__(
        self, size: int, *arguments: object, by_hand: bool = False, own: Mapping[int, Sequence[object]] = {}
    ) -> None:
        ask = [str(EXAMPLE), "--tp", str(size), *SMALL, *map(str, arguments)]
        self.log: list[str] = []
        self._of: dict[int, list[str]] = {}
        self._readers: list[threading.Thread] = []
        self.started = time.monotonic()
        clean = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
        clean["OMP_NUM_THREADS"] = "1"
        if by_hand:
            told = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            self.processes = [
                self._start(
                    r,
                    [*ask, *map(str, own.get(r, ()))],
                    clean | told | {"RANK": f"{r}", "LOCAL_RANK": f"{r}"},
                )
                for r in range(size)
            ]
        else:
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
            self.processes = [self._start(0, [*launch, *ask], clean)]

    def _start(self, rank: int, arguments: list[str], env: dict[str, str]) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        lines = self._of[rank] = []

        def read() -> None:
            for line in process.stdout:
                lines.append(line)
                self.log.append(line)

        self._readers.append(threading.Thread(target=read, daemon=True))
        self._readers[-1].start()
        return process

    def __enter__(self) -> ServedRanks:
        return self

    def __exit__(self, *exc: object) -> None:
        left = self.alive()
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self.processes:
            process.wait(20)

    @property
    def text(self) -> str:
        return "".join(self.log)

    def errors(self, rank: int) -> str:
        """What one rank said that was started by hand."""
        return "".join(self._of[rank])

    def wait_until(self, so, what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not so():
            assert time.monotonic() < deadline, f"{what}: {self.text[-3000:]}"
            assert any(p.poll() is None for p in self.processes), f"ended before {what}: {self.text[-3000:]}"
            time.sleep(0.05)

    def url(self) -> str:
        """Of the API, as soon as it answers."""
        self.wait_until(lambda: " serves " in self.text, "it serves")
        return re.search(r"http://\S+/v1", self.text)[0]

    def ranks(self) -> list[int]:
        """Processes of the ranks, rank 0's first."""
        if len(self.processes) > 1:
            return [process.pid for process in self.processes]
        return sorted(children(self.processes[0].pid))

    def alive(self) -> set[int]:
        """Every process of the job that has not ended, and what it started."""
        roots = [process.pid for process in self.processes if process.poll() is None]
        return {one for root in roots for one in (root, *descendants(root))}

    def wait(self) -> list[int]:
        """Exit codes, once all have ended."""
        deadline = time.monotonic() + DEADLINE_S
        codes = [process.wait(max(deadline - time.monotonic(), 0.1)) for process in self.processes]
        for reader in self._readers:
            reader.join(20)
        return codes


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def children(pid: int) -> list[int]:
    """Processes that a process started, by what the kernel says."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(one) for task in tasks for one in (task / "children").read_text().split()]
    except OSError:  # it has just ended
        return []


def descendants(pid: int) -> list[int]:
    found = children(pid)
    return [*found, *(one for child in found for one in descendants(child))]


def running(pid: int) -> bool:
    """Whether there is such a process, and it is more than an entry that nobody has read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
