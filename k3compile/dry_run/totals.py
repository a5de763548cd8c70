"""What the graphs of a step add up to, before and after the passes.

    kda+moe   61 layers:   rows 488 -> 0,  launches 3416 -> 1830, ...      one line a kind
    the step  all layers, what lies outside of them, and the logits

A layer's costs are those of its graph for the snapshots that this layer can look back to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..graphdiff.cost import cost
from ..passes.snapshot import digest
from ..runtime.config import K3Config
from .contexts import contexts
from .counts import counts
from .mix import Mix
from .trace import Part

CONTEXTS = "contexts"  # collectives inside of the op to which contexts come
PASSES = ("contiguous_views", "latent_tail", "state_export")
COUNTED = ("rows", "finalizes", "embeddings", "others", "tails", "exports")
COSTS = (
    "launches", "allocations", "allocated_bytes", "bytes_read", "bytes_written", "collectives",
    "collective_bytes", "flops",
)  # fmt: skip


class Totals(NamedTuple):
    """One graph times its layers. sums: measure -> number, before and after; ``all_reduce`` and other ops of
    collectives are measures too. peak_bytes: of one layer, the most that is alive at once.

    graph: the compile's key. digests: the graphs counted, by stage. applied, missed: sites by pass, a layer.
    """

    name: str
    layers: int
    compiled: bool
    graph: str
    digests: Mapping[str, str]
    applied: Mapping[str, int]
    missed: Mapping[str, Sequence[str]]
    before: Mapping[str, int]
    after: Mapping[str, int]
    peak_bytes: tuple[int, int]

    @property
    def times(self) -> int:
        """How often a step runs it."""
        return max(self.layers, 1)


def totals_of(part: Part, config: K3Config, mix: Mix, dcp: int = 1) -> Totals:
    """Count and price one part of a step, in context groups of ``dcp`` ranks."""
    stages = {"captured": part.timeline.stages[0], "aten": part.timeline.stage("aten")}
    stages["final"] = part.timeline.stage("final") if part.compiled else stages["aten"]
    before = summed(part, stages["aten"].snapshot, config, mix, dcp)
    before[0]["exports"] = counts(stages["captured"].snapshot).exports * max(len(part.layers), 1)
    after = summed(part, stages["final"].snapshot, config, mix, dcp)
    return Totals(
        name=part.name,
        layers=len(part.layers),
        compiled=part.compiled,
        graph=part.report.key,
        digests={name: digest(stage.snapshot) for name, stage in stages.items()},
        applied={name: part.report.applied(name) for name in PASSES},
        missed={name: part.report.missed(name) for name in PASSES},
        before=before[0],
        after=after[0],
        peak_bytes=(before[1], after[1]),
    )


def summed(
    part: Part, snapshot: Mapping[str, Any], config: K3Config, mix: Mix, dcp: int
) -> tuple[dict[str, int], int]:
    """Counts and costs of a graph over all its layers, and the largest peak of one of them."""
    one, priced, shared = counts(snapshot), cost(snapshot), contexts(snapshot, mix, dcp)
    named = {symbol: name for symbol, name in (priced.symbols or {}).items() if symbol not in shared.sizes}
    asked = {symbol: named.get(symbol, symbol) for symbol in priced.unknown}
    runs = Counter(snapshots_at(layer, config) for layer in part.layers) or Counter([config.num_snapshots])
    times = sum(runs.values())
    found = {name: getattr(one, name) * times for name in COUNTED}
    found |= {name: number * times for name, number in one.collectives.items()}
    found[CONTEXTS] = shared.collectives * times
    found |= dict.fromkeys(COSTS, 0)
    peak = 0
    for snapshots, layers in runs.items():
        sizes = mix.sizes(snapshots) | shared.sizes
        numbers = priced.at({symbol: sizes[name] for symbol, name in asked.items()})
        numbers["collectives"] += shared.collectives - shared.ops
        for name in ("collective_bytes", "bytes_read"):
            numbers[name] += shared.sent - shared.bound
        peak = max(peak, numbers["peak_bytes"])
        for name in COSTS:
            found[name] += numbers[name] * layers
    return found, peak


def snapshots_at(layer: int, config: K3Config) -> int:
    """Snapshots in the bank when a layer runs, its own among them."""
    return sum(config.is_snapshot(i) for i in range(layer + 1))


def added(parts: Iterable[Totals]) -> tuple[dict[str, int], dict[str, int]]:
    """All parts of a step together, before and after."""
    sides: tuple[Counter[str], Counter[str]] = Counter(), Counter()
    for part in parts:
        for side, numbers in zip(sides, (part.before, part.after)):
            side.update(numbers)
    return dict(sides[0]), dict(sides[1])
