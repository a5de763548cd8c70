"""How far loading is: a bar on a terminal, now and then a line elsewhere; of several ranks, the slowest."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from ..runtime.parallel.agreement import Meeting

log = logging.getLogger(__name__)

LINE_S = 10.0  # between two lines where there is no terminal
Told = Callable[[int, int], None]  # (bytes done, bytes in all)


@contextmanager
def loading_progress(meeting: Meeting | None = None) -> Iterator[Told]:
    """What a loader calls as it goes on. Rank 0 shows it; every rank tells the others, and hears their end.

    Each call may raise what ``Meeting.progress`` raises.
    """
    shown = meeting is None or meeting.rank == 0
    with (bar() if sys.stderr.isatty() else lines()) if shown else silence() as show:

        def told(done: int, total: int) -> None:
            slowest = (done, total) if meeting is None else meeting.progress(done, total)
            if slowest is not None:
                show(*slowest)

        yield told


@contextmanager
def silence() -> Iterator[Told]:
    yield lambda done, total: None


@contextmanager
def bar() -> Iterator[Told]:
    """A bar that goes when it is full: what stays is the line that says how long it took."""
    columns = TextColumn("loading"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("loading", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def lines() -> Iterator[Told]:
    """A line every few seconds, so that a short load has none."""
    last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_S:
            last = time.monotonic()
            log.info("loading: %.0f %% of %.1f GB", 100 * done / max(total, 1), total / 1e9)

    yield show
