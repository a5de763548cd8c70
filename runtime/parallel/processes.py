"""The ranks' processes on this machine: whether one still lives, and how to end one that cannot end itself.

A process number is used again after its process; a handle (pidfd) is not, and the start time, which a rank
tells with its number, says that the handle is of the right one. Other systems than Linux have no handles:
there nobody is looked after, and a launcher that waits for a rank which stands still waits as it likes.
"""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Identity(NamedTuple):
    """A process, in the same words for every process of its machine. host: "" where there are no handles."""

    host: str
    pid: int
    start: str


def identity() -> Identity:
    """This process."""
    pid = os.getpid()
    if not hasattr(os, "pidfd_open"):
        return Identity("", pid, "")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    space = os.stat("/proc/self/ns/pid").st_ino  # containers of one machine count from 1 each
    return Identity(f"{boot}/{space}", pid, start_of(pid))


def start_of(pid: int) -> str:
    """When a process started, in ticks since the machine did; "" for none. Its name may hold anything, and
    stands in brackets before.
    """
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    return ""


class Process:
    """Another process of this machine."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._poll = select.poll()
        self._poll.register(handle, select.POLLIN)

    @property
    def alive(self) -> bool:
        """Whether it has not ended; one that stands still lives."""
        return not self._poll.poll(0)

    def kill(self) -> bool:
        """End it, even one that stands still; False where it had ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            return True
        return False

    def close(self) -> None:
        """Let go of the handle."""
        self._poll.unregister(self._handle)
        os.close(self._handle)


def find(who: Identity) -> Process | None:
    """The process of that identity; None on another machine, without handles, or when it has ended."""
    own = identity()
    if not own.host or who.host != own.host:
        return None
    try:
        handle = os.pidfd_open(who.pid)
    except ProcessLookupError:
        return None
    if start_of(who.pid) != who.start:
        os.close(handle)
        return None
    return Process(handle)
