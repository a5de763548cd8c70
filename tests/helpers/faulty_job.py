"""A model served by ranks of which one fails, seen from outside: by clients, port and processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import httpx

SCRIPT = Path(__file__).with_name("faulty_rank.py")
OPTIONS = ("--no-compile", "--port", "0", "--max-model-len", "2048", "--max-num-seqs", "8")
PROMPT = "Once upon a time there was a rank that would not go on. " * 3


@dataclass
class Answer:
    """What a client saw. ended: when (seconds since the epoch); cut: the connection broke off."""

    stream: bool
    status: int | None = None
    events: list[str] = field(default_factory=list)
    ended: float | None = None
    cut: str | None = None

    @property
    def refused(self) -> bool:
        """Nobody listened any more when it came."""
        return self.status is None and (self.cut or "").startswith("ConnectError")

    @property
    def error(self) -> str | None:
        """The message of the error that it ended with."""
        for event in self.events[-2:]:
            if event.startswith("{") and "error" in (said := json.loads(event)):
                return said["error"]["message"]
        return None


class FaultyJob:
    """torchrun with ``ranks`` processes, of which one meets with a mishap; ended whatever happens."""

    def __init__(
        self, folder: Path, fault: str, phase: str, rank: int, *options: str, ranks: int = 2
    ) -> None:
        self.name = f"k3-{uuid.uuid4().hex}"
        self.file, self.log = folder / f"{self.name}.at", folder / f"{self.name}.log"
        self.answers: list[Answer] = []
        self.health: list[tuple[float, int | None]] = []  # (when, status; None: the port is closed)
        self.url: str | None = None
        self._over = threading.Event()
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
        ]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*launcher, SCRIPT, self.file, fault, phase, str(rank), f"--tp={ranks}", *OPTIONS, *options],
                stdout=log,
                stderr=log,
                env={**os.environ, "K3_TEST_JOB": self.name, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def __enter__(self) -> FaultyJob:
        return self

    def __exit__(self, *exc) -> None:
        self._over.set()
        for pid in [*self.left(), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(10)

    def said(self) -> str:
        """The log so far."""
        return self.log.read_text(errors="replace")

    def wait_for(self, condition, seconds: float, what: str):
        """What ``condition()`` gives once it is true."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < deadline, f"{what} after {seconds} s:\n{self.said()[-6000:]}"
            time.sleep(0.05)
        return value

    def until_it_serves(self, seconds: float = 240.0) -> None:
        """Wait for the port, and watch it from then on."""
        line = self.wait_for(
            lambda: (
                re.search(r"serves .* at (http://\S+)/v1", self.said())
                or (self.process.poll() is not None and "ended")
            ),
            seconds,
            "it does not serve",
        )
        assert line != "ended", self.said()[-6000:]
        self.url = line[1]
        threading.Thread(target=self._watch_health, daemon=True).start()

    def at(self, seconds: float = 120.0) -> float:
        """When the mishap happened."""
        self.wait_for(self.file.exists, seconds, "no mishap")
        return float(self.file.read_text())

    def traffic(self) -> list[threading.Thread]:
        """Four clients: one that has begun to read, then one without a stream and two with."""
        threads = [self.ask(stream=True)]
        first = self.answers[0]
        self.wait_for(lambda: len(first.events) > 2 or first.ended, 60, "no first token")
        assert first.ended is None, first
        return threads + [self.ask(stream) for stream in (False, True, True)]

    def ask(self, stream: bool, tokens: int = 1500) -> threading.Thread:
        """A client that asks for a long answer; what it sees is added to ``answers``."""
        answer = Answer(stream)
        self.answers.append(answer)
        thread = threading.Thread(target=self._ask, args=(answer, tokens), daemon=True)
        thread.start()
        return thread

    def _ask(self, answer: Answer, tokens: int) -> None:
        body = {"prompt": PROMPT, "max_tokens": tokens, "stream": answer.stream, "ignore_eos": True}
        try:
            with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=120) as response:
                answer.status = response.status_code
                for line in response.iter_lines():
                    answer.events.append(line.removeprefix("data: ")) if line else None
        except httpx.HTTPError as error:
            answer.cut = f"{type(error).__name__}: {error}"
        answer.ended = time.time()

    def _watch_health(self) -> None:
        while not self._over.is_set():
            try:
                status = httpx.get(f"{self.url}/health", timeout=1.0).status_code
            except httpx.TimeoutException:
                status = 0
            except httpx.HTTPError:
                status = None
            self.health.append((time.time(), status))
            time.sleep(0.05)

    def sick_at(self) -> float | None:
        """When /health said 503 first, or the port was closed."""
        return next((when for when, status in self.health if status in (503, None)), None)

    def left(self) -> list[int]:
        """Processes of this job that live, in whatever session they are."""
        mark, found = f"K3_TEST_JOB={self.name}".encode(), []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    def ranks(self) -> dict[int, int]:
        """Process of each rank."""
        told = {pid: Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in self.left()}
        return {int(word[5:]): pid for pid, env in told.items() for word in env if word.startswith(b"RANK=")}

    def listens(self) -> bool:
        """Whether anybody takes connections at its port."""
        host, port = self.url.removeprefix("http://").split(":")
        with socket.socket() as client:
            client.settimeout(1.0)
            return client.connect_ex((host, int(port))) == 0
