"""The sizes that `--at` gives: by what they measure, by symbol, or by a short name of K3's own layers.

p.0=64        rows of the input p       u1=64        a symbol of the graph       T=64        K3's tokens
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..features import nearest
from ..graphdiff.figures import Cost

SHORT = {
    "T": "p.0",
    "snapshots": "blocks.0",
    "verify": "step.spans[0]",
    "decode": "step.spans[1]",
    "prefill": "step.spans[2]",
}  # our layers' inputs; see runtime/step.py


def sizes_of(text: str | None) -> dict[str, int]:
    """``p.0=64,u0=3`` as a mapping. Raises ValueError for anything else."""
    pairs = [part.partition("=") for part in (text or "").split(",") if part.strip()]
    wrong = [f"{name}{eq}{value}" for name, eq, value in pairs if not eq or not value.strip().isdecimal()]
    if wrong:
        raise ValueError(f"--at has {', '.join(wrong)}; expected sizes such as p.0=64,u0=3")
    return {name.strip(): int(value) for name, _, value in pairs}


def known_sizes(cost: Cost, sizes: Mapping[str, int]) -> dict[str, int]:
    """Those of ``sizes`` that one graph has, by symbol; its own names go before short ones."""
    found = {}
    for name, number in sizes.items():
        symbol = cost.resolved(name) or cost.resolved(SHORT.get(name, name))
        if symbol:
            found[symbol] = number
    return found


def check_sizes(costs: Iterable[Cost], sizes: Mapping[str, int]) -> None:
    """Raises ValueError for a size that no graph has, and for every one that is missing in any."""
    costs = list(costs)
    names = list(dict.fromkeys((c.symbols or {}).get(s, s) for c in costs for s in c.unknown))
    short = [s for s, meaning in SHORT.items() if meaning in names]
    for name in sizes:
        if not any(known_sizes(cost, {name: 1}) for cost in costs):
            choices = ", ".join([*names, *short]) or "none, the costs are numbers already"
            raise ValueError(
                f"--at: no size is called {name}{nearest(name, [*names, *short])}; sizes: {choices}"
            )
    missing = dict.fromkeys(
        (c.symbols or {}).get(s, s) for c in costs for s in c.unknown if s not in known_sizes(c, sizes)
    )
    if missing:
        raise ValueError(f"--at lacks {','.join(f'{name}=...' for name in missing)}")
