"""Ranks as threads of one process: torch's own test backend, for checks of sums and shapes in milliseconds.

    on_threads(4, work)      work(rank) on four threads whose default process group joins them

Only for code that is called eagerly: the compiler is not made for several threads. What a deadlock would
leave hanging ends after ``timeout_s`` with an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded


def on_threads(ranks: int, work: Callable[[int], Any], timeout_s: float = 60.0) -> list[Any]:
    """What ``work(rank)`` returned on every rank. Raises the error of the lowest rank that failed first.

    The process must not be in a group of several ranks; one it made for itself alone is put back afterwards.
    """
    results: list[Any] = [None] * ranks
    errors: list[BaseException | None] = [None] * ranks
    store = dist.HashStore()
    before = dist.distributed_c10d._world
    threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # each thread has its own table of groups

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
            with torch.no_grad():
                results[rank] = work(rank)
        except BaseException as error:
            errors[rank] = error
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout_s)
        late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    finally:
        threaded.ProcessLocalGroup.reset()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()
        assert dist.distributed_c10d._world is before
    for error in errors:
        if error is not None and "Another thread" not in str(error):
            raise error
    assert not late, f"ranks {late} still wait after {timeout_s} s"
    return results
