"""What a step must come to, from the configuration alone, and what the graphs came to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..runtime.config import K3Config
from .totals import Totals, added
from .trace import LOGITS

MOVES = 8  # of a KDA layer: three gathers and one scatter for each of two classes of rows
EXPORTS = 2  # of a KDA layer: recurrent state and conv window


class Check(NamedTuple):
    """One number a step, expected and found."""

    what: str
    expected: int
    found: int

    @property
    def ok(self) -> bool:
        return self.expected == self.found


def checks(config: K3Config, tp: int, dcp: int, parts: Sequence[Totals]) -> list[Check]:
    """All that must hold of a step on ``tp`` ranks, in context groups of ``dcp``."""
    before, after = added(parts)
    left = 0 if config.routed_expert_hidden_size else moe(config)  # finalizes, which read rows by their data
    return [
        *of_moves(config, before, after),
        *of_finalizes(config, before, after),
        *of_sums(config, tp, parts),
        *of_contexts(config, dcp, parts),
        Check("sites that contiguous_views missed", left, missed(parts, "contiguous_views")),
        Check("sites that latent_tail missed", left, missed(parts, "latent_tail")),
        Check("sites that state_export missed", 0, missed(parts, "state_export")),
    ]


def of_moves(config: K3Config, before: Mapping[str, int], after: Mapping[str, int]) -> Iterator[Check]:
    """contiguous_views and state_export, which are about KDA layers."""
    kda = len(config.kda_layers)
    yield Check("gathers and scatters of token rows before the passes", MOVES * kda, before["rows"])
    yield Check("gathers and scatters of token rows after", 0, after["rows"])
    yield Check("states and windows exported inside the pass, before", 0, before["exports"])
    yield Check("states and windows exported inside the pass, after", EXPORTS * kda, after["exports"])


def of_finalizes(config: K3Config, before: Mapping[str, int], after: Mapping[str, int]) -> Iterator[Check]:
    """latent_tail, which needs a latent to work in: Kimi-Linear's experts have none."""
    layers, latent = moe(config), bool(config.routed_expert_hidden_size)
    yield Check("finalize kernels before the passes", layers, before["finalizes"])
    yield Check("finalize kernels after", 0 if latent else layers, after["finalizes"])
    yield Check("latent tails after", layers if latent else 0, after["tails"])


def of_sums(config: K3Config, tp: int, parts: Sequence[Totals]) -> Iterator[Check]:
    """One sum over ranks an attention and a dense layer, two a layer with experts, one for the embedding."""
    several = int(tp > 1)
    sums = 2 * config.num_hidden_layers + moe(config) + several
    yield Check("all-reduces before the passes", sums, added(parts)[0].get("all_reduce", 0))
    (logits,) = (part for part in parts if part.name == LOGITS)
    yield Check("all-gathers of logits", several, logits.before.get("all_gather_into_tensor", 0))


def of_contexts(config: K3Config, dcp: int, parts: Sequence[Totals]) -> Iterator[Check]:
    """A context group gathers the queries of all heads, and gives every rank what was found for its own."""
    if dcp > 1:
        layers = config.num_hidden_layers - len(config.kda_layers)
        found, _ = added(part for part in parts if part.compiled)
        gathers, exchanges = (found.get(op, 0) for op in ("all_gather_into_tensor", "all_to_all_single"))
        yield Check("all-gathers of queries in context groups", layers, gathers)
        yield Check("exchanges of results in context groups", layers, exchanges)


def moe(config: K3Config) -> int:
    """Layers with routed experts."""
    return sum(map(config.is_moe, range(config.num_hidden_layers)))


def missed(parts: Sequence[Totals], name: str) -> int:
    """Sites that a pass left as they were, in all layers."""
    return sum(len(part.missed[name]) * part.layers for part in parts)
