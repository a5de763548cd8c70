"""What a step costs, measured on the forward that serves.

rows        1     8    64         median of five timed forwards each, made monotone
seconds     a     b     c         between: a straight line; beyond: the last line goes on
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

import numpy as np
import torch

from ..cache.holding import Holding
from ..engine_config import EngineConfig
from ..executor import Executor
from ..request import Request
from ..step import build
from ..work import Work
from .draft import Drafter

REPEATS = 5
CONTEXT = 8192  # tokens behind each row that is timed, where the engine allows so many


@dataclass(frozen=True)
class CostTable:
    """Seconds of a pass of so many rows: ``rows`` rise, ``seconds`` never fall, or ValueError."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.rows or len(self.rows) != len(self.seconds):
            raise ValueError(f"a cost table needs a time for each row count, got {self.rows}, {self.seconds}")
        if list(self.rows) != sorted(set(self.rows)) or list(self.seconds) != sorted(self.seconds):
            raise ValueError(f"row counts must rise and times not fall, got {self.rows}, {self.seconds}")

    @classmethod
    def of(cls, times: Mapping[int, Iterable[float]]) -> CostTable:
        """From several times of each row count: their median, and more rows never cost less."""
        rows = tuple(sorted(times))
        return cls(rows, tuple(accumulate((median(times[n]) for n in rows), max)))

    def __str__(self) -> str:
        return ", ".join(f"{n}: {1e3 * s:.2f}" for n, s in zip(self.rows, self.seconds))

    def at(self, rows: np.ndarray) -> np.ndarray:
        """Seconds of each of ``rows``, float64. Fewer than were measured cost what the fewest did."""
        known, seconds = np.array(self.rows, float), np.array(self.seconds)
        inside = np.interp(rows, known, seconds)
        if len(known) == 1:
            return inside
        slope = (seconds[-1] - seconds[-2]) / (known[-1] - known[-2])
        return inside + slope * np.maximum(np.asarray(rows) - known[-1], 0)


def measure(
    run: Callable[[int], object],
    sizes: Sequence[int],
    repeats: int = REPEATS,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Time ``run(rows)``, which returns when all is done; once more per size before, for what warms up."""
    times: dict[int, list[float]] = {}
    for rows in sizes:
        run(rows)
        times[rows] = []
        for _ in range(repeats):
            start = clock()
            run(rows)
            times[rows].append(clock() - start)
    return CostTable.of(times)


def measure_forward(executor: Executor, config: EngineConfig) -> CostTable:
    """What verifying costs: forward and logits of verify rows, from one row to all a step can hold.

    config.max_model_len must be set. The rows live in the null slot and the null page, which belong to
    nobody, with as much context as the engine allows, up to CONTEXT tokens; without state replay also in the
    slots of requests, so that none may run then.
    """
    context = context_of(config)

    @torch.no_grad()
    def run(rows: int) -> float:
        work = null_work(rows, config, context)
        batch = build(work, config.max_num_seqs, config.num_drafts, exports=executor.exports)
        return executor.run(batch.step, batch.logit_rows)[-1, -1].item()  # waits for the device

    return measure(run, row_counts(config))


def measure_draft(drafter: Drafter, config: EngineConfig) -> CostTable:
    """What drafting costs, from one request to as many as run at once; on the terms of the above."""
    context = context_of(config)
    requests = [null_request(context, 0) for _ in range(config.max_num_seqs)]
    holdings = [Holding(0, [0], null_pages(context + 1, config))] * len(requests)
    sizes = powers_up_to(config.max_num_seqs)
    table = measure(lambda n: drafter.propose(requests[:n], holdings[:n]), sizes)
    for request in requests:
        drafter.forget(request)
    return table


def context_of(config: EngineConfig) -> int:
    """Tokens behind each row that is timed; none where the null page is poisoned."""
    assert config.max_model_len is not None, "the engine's own length is needed"
    return 0 if config.poison else max(min(CONTEXT, config.max_model_len - config.num_drafts - 1), 0)


def row_counts(config: EngineConfig) -> list[int]:
    """Powers of two up to what all requests with all their drafts take, and that itself."""
    most = min(config.max_num_seqs * (config.num_drafts + 1), config.max_num_batched_tokens)
    return powers_up_to(most)


def powers_up_to(most: int) -> list[int]:
    """1, 2, 4, ... and ``most`` itself."""
    return [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most]


def null_work(rows: int, config: EngineConfig, context: int) -> list[Work]:
    """Requests of one row and up to num_drafts more, in the null slot and page, ``rows`` rows in all.

    Without state replay each row's state needs a slot of its own: those of requests to come, which are
    cleared when they come.
    """
    work: list[Work] = []
    while rows:
        count = min(rows, config.num_drafts + 1)
        request = null_request(context, count - 1)
        pages = null_pages(context + count, config)
        start = 1 + len(work) * (config.num_drafts + 1)
        scratch = () if config.state_replay else range(start, start + count)
        work.append(Work(request, count, count - 1, True, 0, pages, scratch=scratch))
        rows -= count
    return work


def null_request(context: int, drafts: int) -> Request:
    """A request that decodes its next token after ``context`` others."""
    request = Request("cost", array("q", bytes(8 * (context + 1))))
    request.seen, request.drafts = context, [0] * drafts
    return request


def null_pages(tokens: int, config: EngineConfig) -> array:
    """The null page, as often as ``tokens`` tokens need one."""
    return array("q", bytes(8 * -(-tokens // config.page_size)))
