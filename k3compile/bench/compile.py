"""How long a model compiles: Dynamo's trace, our passes, the rest; cold, and warm in a second process.

    cold    an empty cache folder      trace | passes (processor time) | AOTAutograd + Inductor
    warm    the folder it left         trace | what our backend and the caches take, report included

Each round starts both in processes of their own. Medians are over rounds. Imports are outside the clock.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from ..runtime.presets import PRESETS, config_json

MAX_PASS_SHARE, MAX_WARM_RATIO = 0.10, 1.5  # what the design asks for; a run is held to them on request


@dataclass(frozen=True)
class KindTimes:
    """One kind of layer in one process, in seconds. passes is processor time, the others wall time.

    trace: all of Dynamo. backend: our backend with AOTAutograd and Inductor or their caches, passes included.
    """

    name: str
    layers: int
    status: str
    trace: float
    passes: float
    backend: float
    remarks: int

    @property
    def total(self) -> float:
        return self.trace + self.backend


@dataclass(frozen=True)
class Round:
    """A cold and a warm start of one model: a :class:`KindTimes` a kind, in the same order."""

    cold: tuple[KindTimes, ...]
    warm: tuple[KindTimes, ...]

    @property
    def pass_share(self) -> float:
        """Our passes' processor time in the whole cold compile."""
        return total(self.cold, "passes") / total(self.cold, "total")

    @property
    def warm_ratio(self) -> float:
        """The whole warm start, over Dynamo's trace within it."""
        return total(self.warm, "total") / total(self.warm, "trace")


@dataclass(frozen=True)
class CompileResult:
    """All rounds of one model."""

    name: str
    rounds: tuple[Round, ...]

    @property
    def pass_share(self) -> float:
        """Median over rounds."""
        return statistics.median(r.pass_share for r in self.rounds)

    @property
    def warm_ratio(self) -> float:
        """Median over rounds."""
        return statistics.median(r.warm_ratio for r in self.rounds)

    def seconds(self, start: str, what: str, kind: int | None = None) -> float:
        """Median over rounds of one quantity of ``cold`` or ``warm``, of one kind or of all."""
        kinds = [getattr(r, start) for r in self.rounds]
        return statistics.median(total(k if kind is None else k[kind : kind + 1], what) for k in kinds)

    def over_budget(self, max_pass_share: float | None, max_warm_ratio: float | None) -> list[str]:
        """The budgets given that are exceeded, as sentences."""
        said = []
        if max_pass_share is not None and self.pass_share > max_pass_share:
            said.append(f"passes take {self.pass_share:.1%} of a cold compile, budget {max_pass_share:.1%}")
        if max_warm_ratio is not None and self.warm_ratio > max_warm_ratio:
            said.append(f"a warm start takes {self.warm_ratio:.2f}x the trace, budget {max_warm_ratio:.2f}x")
        return said

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, every round of them."""
        return {
            "name": self.name,
            "pass_share": self.pass_share,
            "warm_ratio": self.warm_ratio,
            "rounds": [asdict(r) for r in self.rounds],
        }


def total(kinds: tuple[KindTimes, ...], what: str) -> float:
    return sum(getattr(kind, what) for kind in kinds)


def bench(target: str, rounds: int = 3, say: Callable[[str], None] = lambda line: None) -> CompileResult:
    """Measure a preset, or a folder with a ``config.json`` (weights are not needed); minutes a round.

    say: is told each round. Raises ValueError for another target or less than one round, RuntimeError when a
    start fails or the warm one has another report.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    if target not in PRESETS and not (Path(target) / "config.json").is_file():
        raise ValueError(f"{target!r} is neither a folder with config.json nor one of {', '.join(PRESETS)}")
    found = []
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            model = Path(target)
            if target in PRESETS:
                model = Path(folder) / "model"
                model.mkdir()
                (model / "config.json").write_text(json.dumps(config_json(PRESETS[target])))
            caches = Path(folder) / "caches"
            found.append(Round(start(model, caches), start(model, caches)))
        check_reports(found[-1])
        say(f"round {number + 1}: cold {total(found[-1].cold, 'total'):.1f} s")
    return CompileResult(target, tuple(found))


def start(model: Path, caches: Path) -> tuple[KindTimes, ...]:
    """Compile every kind of layer of ``model`` in a new process with this cache folder."""
    without = [part for name in ("K3_DUMP", "K3_DISABLE", "K3_FUEL") for part in ("-u", name)]
    setting = [f"TORCHINDUCTOR_CACHE_DIR={caches}"]
    command = ["env", *without, *setting, sys.executable, "-m", __spec__.name, str(model)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"compiling {model} failed:\n{done.stderr}")
    return tuple(KindTimes(**kind) for kind in json.loads(done.stdout.splitlines()[-1]))


def check_reports(one: Round) -> None:
    """Raise RuntimeError unless the warm start was one, with the report of the cold one."""
    for cold, warm in zip(one.cold, one.warm, strict=True):
        if (warm.status, warm.remarks) != ("cached", cold.remarks):
            raise RuntimeError(
                f"{cold.name}: the second start was {warm.status} with {warm.remarks} remarks, "
                f"the first {cold.status} with {cold.remarks}"
            )


def table(result: CompileResult) -> Table:
    """A row a kind of layer and one for all, in milliseconds."""
    made = Table(title=f"{result.name}: milliseconds a kind of layer, medians of {len(result.rounds)} rounds")
    columns = ("trace", "passes (CPU)", "AOT + Inductor", "cold", "passes / cold", "warm", "warm / trace")
    for column in ("kind", "layers", *columns):
        made.add_column(column, justify="left" if column == "kind" else "right")
    kinds = result.rounds[0].cold
    for place, kind in [*enumerate(kinds), (None, None)]:
        cold = {w: result.seconds("cold", w, place) for w in ("trace", "passes", "backend", "total")}
        warm = {w: result.seconds("warm", w, place) for w in ("trace", "total")}
        if kind is None:
            made.add_section()
        times = (cold["trace"], cold["passes"], cold["backend"] - cold["passes"], cold["total"])
        made.add_row(
            kind.name if kind else "all",
            str(kind.layers if kind else sum(k.layers for k in kinds)),
            *(f"{t * 1e3:.0f}" for t in times),
            f"{cold['passes'] / cold['total']:.1%}",
            f"{warm['total'] * 1e3:.0f}",
            f"{warm['total'] / warm['trace']:.2f}x",
        )
    return made


def compile_here(model: str) -> list[KindTimes]:
    """Compile every kind of layer in this process."""
    import torch._inductor.compile_fx  # noqa: F401  imports are not what is measured
    from torch._dynamo.utils import get_compilation_metrics

    from ..kinds import compile_kinds
    from ..options import CompileOptions
    from ..runtime.config import K3Config

    kinds = compile_kinds(K3Config.from_file(model), CompileOptions())
    frames = [m for m in get_compilation_metrics() if m.co_name == "forward"][-len(kinds) :]
    return [
        KindTimes(
            name=kind.name,
            layers=kind.layers,
            status=kind.report.status,
            trace=frame.entire_frame_compile_time_s - frame.backend_compile_time_s,
            passes=sum(r.cpu_seconds for r in kind.report.records)
            if kind.report.status == "compiled"
            else 0.0,
            backend=frame.backend_compile_time_s,
            remarks=len(kind.report.remarks),
        )
        for kind, frame in zip(kinds, frames, strict=True)
    ]


if __name__ == "__main__":
    print(json.dumps([asdict(kind) for kind in compile_here(sys.argv[1])]))
