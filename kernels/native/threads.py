"""How many threads a kernel gets, and how the loops around it get by with one.

Loops that Inductor makes for a number of rows it does not know start all threads for a single row, which
costs more than the loop; ours weigh their own work. So a pass over few rows runs ``with alone``: OpenMP
regions that name no number have the calling thread, and threads() still says what torch was told.
"""

from __future__ import annotations

import ctypes
import threading
from types import TracebackType

import torch

_local = threading.local()


class Alone:
    """A context for the calling thread; others are not concerned. It may be entered within itself."""

    def __init__(self) -> None:
        self._set = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)  # of the runtime torch has loaded

    def __enter__(self) -> None:
        before = getattr(_local, "before", None)
        if before is None:
            before = _local.before = []
        before.append(torch.get_num_threads())
        if self._set is not None and before[-1] > 1:
            self._set(1)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        count = _local.before.pop()
        if self._set is not None and count > 1:
            self._set(count)


alone = Alone()


def threads() -> int:
    """As many as torch was told to use on this thread."""
    before = getattr(_local, "before", None)
    return before[0] if before else torch.get_num_threads()
