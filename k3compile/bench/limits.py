"""What this machine can do at most, measured: bytes read, bytes read and written, FLOPs a second."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

LARGE = 1 << 16  # bytes of a tensor from which on its reading counts


@dataclass(frozen=True)
class MachineLimits:
    """Measured ceilings of one machine at ``threads`` threads."""

    threads: int
    bytes_per_second: float  # read, by a sum or a matrix times a vector: what decode is bound by
    flops_per_second: float  # float32 matrix times matrix, 2mnk: what prefill is bound by
    copy_bytes_per_second: float = 0.0  # read and written, by a copy or a change in place

    def or_better(self, other: MachineLimits) -> MachineLimits:
        """The larger of each: what was measured at two times, when others were running or not."""
        return MachineLimits(
            self.threads,
            max(self.bytes_per_second, other.bytes_per_second),
            max(self.flops_per_second, other.flops_per_second),
            max(self.copy_bytes_per_second, other.copy_bytes_per_second),
        )


def measure(side: int = 4096, rounds: int = 7) -> MachineLimits:
    """Time reads and changes of a matrix of ``side``, and a product (float32); best of ``rounds``.

    The best and not the median: a limit is what the machine can do when nothing disturbs it. The matrix has
    ``4 * side**2`` bytes, which has to be several times the last-level cache. torch's product with a vector
    does not reach what memory gives on every CPU, its sum of all elements may.
    """
    matrix, other = torch.ones(side, side), torch.zeros(side, side)
    vector = torch.ones(side)
    square = torch.ones(min(side, 2048), min(side, 2048))
    read = min(best(lambda: torch.mv(matrix, vector), rounds), best(lambda: matrix.sum(), rounds))
    copy = min(best(lambda: other.copy_(matrix), rounds), best(lambda: matrix.mul_(1.0), rounds))
    gemm = best(lambda: torch.mm(square, square), rounds)
    size = matrix.numel() * matrix.element_size()
    return MachineLimits(
        threads=torch.get_num_threads(),
        bytes_per_second=size / read,
        flops_per_second=2 * square.shape[0] ** 3 / gemm,
        copy_bytes_per_second=2 * size / copy,
    )


class SameMemory:
    """Reads the memory of some tensors and does nothing else: what a product with them is bound by.

    How fast that goes is not the same for all memory of a machine: it depends on the pages, its own and those
    of a host below it. bytes: that a call reads.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        self._parts = [flat_of(s) for s in storages.values() if s.nbytes() >= LARGE]
        self.bytes = sum(4 * part.numel() for part in self._parts)

    def __call__(self) -> None:
        for part in self._parts:
            part.sum()


def flat_of(storage: torch.UntypedStorage) -> Tensor:
    """Its bytes as float32 numbers, whatever they mean."""
    return torch.empty(0, dtype=torch.float32).set_(storage, 0, (storage.nbytes() // 4,))


def best(run: Callable[[], object], rounds: int) -> float:
    """Shortest of ``rounds`` times of ``run``, in seconds, after one that is not counted."""
    run()
    return min(seconds(run) for _ in range(rounds))


def seconds(run: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@dataclass(frozen=True)
class Sample:
    """Repeated times of one thing, in seconds."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def interval(self) -> tuple[float, float]:
        """The middle half: first and third quartile."""
        if len(self.values) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, high


def interleaved(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, Sample]:
    """Time all ``runs`` round by round, so that a disturbance meets each of them, not one."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(seconds(run))
    return {name: Sample(tuple(values)) for name, values in times.items()}
