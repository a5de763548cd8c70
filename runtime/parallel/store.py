"""This process's connection to the store in which the ranks meet, and what it says while there is none.

    keeps    until the host is known           --> listen at host:port, which is free or an error at once
    else     until somebody listens there      --> connect  --> a store
                 | says why not, now and then         | says that no store answers

Torch's own client waits without a word, prints its C++ frames when it gives up, and waits for ever where
something else than a store listens. So a plain socket goes ahead of it, and it connects on a thread.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from .waiting import Waiting

POLL_S = 0.25
ANSWER_S = 2.0  # for a machine to say whether somebody listens there


class NoStore(Exception):
    """Nobody keeps the store, or this process cannot."""


def connect(host: str, port: int, keeps: bool, patience_s: float) -> dist.TCPStore:
    """The store at an address, kept by this process or by another one.

    patience_s: for the process that keeps it to come, and of what is asked of the store later. Raises
    :class:`NoStore` saying what is wrong and what to do.
    """
    where, waiting = f"{host}:{port}", Waiting(patience_s)
    until_possible(known if keeps else listened, host, port, waiting)
    made: list[dist.TCPStore | RuntimeError] = []
    # A daemon: nothing else ends a client that talks to no store.
    thread = threading.Thread(target=lambda: made.append(attempt(host, port, keeps, patience_s)), daemon=True)
    thread.start()
    while thread.is_alive() and not waiting.over:
        thread.join(POLL_S)
        waiting.say(lambda: f"the store at {where}: nothing there answers as one")
    found = made[0] if made else None
    if found is None:
        raise NoStore(
            f"there is no store at {where}, where the ranks meet: nothing there has answered as one in "
            f"{patience_s:g} s; see MASTER_ADDR, and choose another MASTER_PORT"
        )
    if isinstance(found, RuntimeError):
        raise NoStore(refusal(where, keeps, str(found).splitlines()[0]))
    return found


def attempt(host: str, port: int, keeps: bool, patience_s: float) -> dist.TCPStore | RuntimeError:
    """Torch's store, or why there is none."""
    try:
        return dist.TCPStore(
            host,
            port,
            is_master=keeps,
            wait_for_workers=False,  # agreement.py says who is missing
            timeout=timedelta(seconds=patience_s),
            multi_tenant=True,
        )
    except RuntimeError as error:
        return error


def refusal(where: str, keeps: bool, error: str) -> str:
    if not keeps:
        return f"there is no store at {where}, where the ranks meet: {error}"
    taken = "is another process RANK 0, or another job there? Choose another MASTER_PORT"
    return f"this process cannot keep the store at {where}: {error}" + (
        f"; {taken}" if "EADDRINUSE" in error else ""
    )


def until_possible(check: Callable[[str, int], object], host: str, port: int, waiting: Waiting) -> None:
    """Wait until ``check`` of an address raises no OSError. Raises :class:`NoStore` with the last one."""
    while True:
        try:
            check(host, port)
            return
        except OSError as error:
            why = error.strerror or str(error)
        if waiting.over:
            raise NoStore(
                f"there is no store at {host}:{port}, where the ranks meet, after {waiting.patience_s:g} s: "
                f"{why}; see whether rank 0 was started, and MASTER_ADDR and MASTER_PORT"
            )
        waiting.say(lambda why=why: f"the store at {host}:{port}, which rank 0 or torchrun keeps: {why}")
        time.sleep(POLL_S)


def listened(host: str, port: int) -> None:
    """Raise OSError where nobody listens."""
    socket.create_connection((host, port), ANSWER_S).close()


def known(host: str, port: int) -> None:
    """Raise OSError for a host without an address; torch repeats that to no end."""
    socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
