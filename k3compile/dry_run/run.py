"""A dry run: trace every rank asked for, count the first, hold the others and the numbers against it.

found = dry_run(K3Config.from_file(path), DryRun(tp=8, ranks=(0, 3, 7)))
found.ok, found.step[0]["rows"], found.step[1]["rows"]             True, 552, 0
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..options import CompileOptions
from ..runtime.config import K3Config
from ..runtime.parallel.sharding import check
from .checks import Check, checks
from .counts import sent
from .fake_ranks import fake_ranks
from .mix import Mix
from .totals import Totals, added, totals_of
from .trace import Part, trace

SCHEMA = "k3dryrun/1"
FEATURES = ("all", "prefix_cache")  # every pass has what it requires


@dataclass(frozen=True)
class DryRun:
    """What is asked for. ranks: those to trace, the first of which is counted. disable: passes not to run."""

    tp: int = 1
    dcp: int = 1
    ranks: tuple[int, ...] = (0,)
    mix: Mix = field(default_factory=Mix)
    dtype: torch.dtype = torch.bfloat16
    disable: tuple[str, ...] = ()


class Found(NamedTuple):
    """The result. strangers: what another rank's graphs do otherwise, one sentence each. seconds: wall time.
    peak_rss_bytes: of this process, from its start.
    """

    asked: DryRun
    family: str
    layers: int
    parts: tuple[Totals, ...]
    step: tuple[Mapping[str, int], Mapping[str, int]]
    checks: tuple[Check, ...]
    strangers: tuple[str, ...]
    seconds: float
    peak_rss_bytes: int

    @property
    def ok(self) -> bool:
        """Whether every number is what the configuration says, and all ranks run the same graphs."""
        return all(one.ok for one in self.checks) and not self.strangers

    def to_json(self) -> dict[str, Any]:
        """Plain data, schema ``k3dryrun/1``."""
        asked = self.asked
        return {
            "schema": SCHEMA,
            "family": self.family,
            "layers": self.layers,
            **{name: getattr(asked, name) for name in ("tp", "dcp")},
            "ranks": list(asked.ranks),
            "dtype": str(asked.dtype).removeprefix("torch."),
            "disable": list(asked.disable),
            "mix": {"verify": asked.mix.verify, "decode": asked.mix.decode, "prefill": asked.mix.prefill}
            | {name: getattr(asked.mix, name) for name in ("context", "page_size", "tokens", "requests")},
            "parts": [part._asdict() for part in self.parts],
            "step": dict(zip(("before", "after"), self.step)),
            "checks": [one._asdict() | {"ok": one.ok} for one in self.checks],
            "strangers": list(self.strangers),
            "ok": self.ok,
            "seconds": self.seconds,
            "peak_rss_bytes": self.peak_rss_bytes,
        }


def dry_run(config: K3Config, asked: DryRun) -> Found:
    """Trace, rewrite and count. Raises ValueError for what so many ranks cannot share, for ranks that do not
    exist, and in a process that is in a process group.
    """
    started = time.perf_counter()
    check(config, asked.tp, asked.dcp, asked.mix.page_size)
    options = CompileOptions(inner="aot_eager", features=FEATURES, disable=asked.disable)
    first: list[Part] = []
    strangers: list[str] = []
    for rank in asked.ranks:
        with fake_ranks(rank, asked.tp, asked.dcp) as ranks:
            parts = trace(config, ranks, asked.mix, options, asked.dtype)
        first = first or parts
        strangers += [f"rank {rank}: {what}" for what in differences(first, parts)]
    totals = tuple(totals_of(part, config, asked.mix, asked.dcp) for part in first)
    return Found(
        asked=asked,
        family=config.family,
        layers=config.num_hidden_layers,
        parts=totals,
        step=added(totals),
        checks=tuple(checks(config, asked.tp, asked.dcp, totals)),
        strangers=tuple(strangers),
        seconds=time.perf_counter() - started,
        peak_rss_bytes=peak_rss_bytes(),
    )


def differences(first: Sequence[Part], other: Sequence[Part]) -> list[str]:
    """How a rank's graphs are others than the first rank's. The embedding's slice starts elsewhere on each
    rank, so that outside of layers the collectives are compared.
    """
    found = []
    for one, another in zip(first, other, strict=True):
        pairs = [(one.timeline.stage(name), another.timeline.stage(name)) for name in ("aten", "final")]
        for before, after in pairs:
            if sent(before.snapshot) != sent(after.snapshot):
                found.append(f"{one.name} makes other collectives than on the first rank")
        if one.compiled and one.report.graphs != another.report.graphs:
            found.append(f"{one.name} has another graph than on the first rank")
    return list(dict.fromkeys(found))


def peak_rss_bytes() -> int:
    """The most memory this process has held."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
