"""The features, one name each: options, passes, runtime, benchmarks, simulator and documents all use these.

A *capability* is what the workload needs; an *optimisation* is what a benchmark switches off to see its
worth. An optimisation whose requirement is off is *inert*: asked for, but with nothing to act on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import combinations
from typing import Literal

TENSOR_PARALLEL = "tensor_parallel"  # a requirement that is a fact of the launch, not a feature


@dataclass(frozen=True)
class Feature:
    """One switch. ``by`` says who acts on it; ``older`` is what the engine it replaces did instead."""

    name: str
    kind: Literal["capability", "optimisation"]
    by: Literal["pass", "runtime"]
    requires: tuple[str, ...]
    older: str


@dataclass(frozen=True)
class Setting:
    """What became of a feature: on, off, or inert with the requirement that is missing."""

    state: Literal["on", "off", "inert"]
    reason: str

    @property
    def on(self) -> bool:
        return self.state == "on"


FEATURES = {
    f.name: f
    for f in (
        Feature("prefix_cache", "capability", "runtime", (), "recompute every prompt"),
        Feature("speculate", "capability", "runtime", (), "one token a step"),
        Feature("offload", "capability", "runtime", ("prefix_cache",), "forget on eviction"),
        Feature("context_parallel", "capability", "runtime", (TENSOR_PARALLEL,), "replicate the MLA cache"),
        Feature(
            "contiguous_views",
            "optimisation",
            "pass",
            (),
            "6 index_select and 2 index_copy_ per KDA layer in a mixed step",
        ),
        Feature(
            "latent_tail", "optimisation", "pass", (), "separate finalize, tensor written and read again"
        ),
        Feature(
            "state_export",
            "optimisation",
            "pass",
            ("prefix_cache",),
            "prefill split at the last cacheable boundary: a second pass",
        ),
        Feature("adaptive_budget", "optimisation", "runtime", ("speculate",), "static budget M - R*e"),
        Feature("state_replay", "optimisation", "runtime", ("speculate",), "K+1 states per request"),
    )
}
CAPABILITIES = tuple(n for n, f in FEATURES.items() if f.kind == "capability")
OPTIMISATIONS = tuple(n for n, f in FEATURES.items() if f.kind == "optimisation")
SLOWER: dict[str, tuple[str, ...]] = {"cpu": (), "cuda": ()}  # optimisations a committed bench shows slower
POINTS = ("all", "default", "baseline", "plain")  # reference points; plain also opens every op


def expand(requested: str | Iterable[str], device: str = "cpu") -> frozenset[str]:
    """The feature names a request means: reference points and feature names, alone or mixed.

    ``all`` is every optimisation, ``default`` those not slower on the ``device`` class, ``baseline`` and
    ``plain`` none. Raises ValueError naming every unknown entry and its nearest match.
    """
    names = (requested,) if isinstance(requested, str) else tuple(requested)
    known = (*POINTS, *FEATURES)
    if unknown := [n for n in names if n not in known]:
        near = [f"{n!r}{nearest(n, known)}" for n in unknown]
        raise ValueError(f"unknown feature {', '.join(near)}; known: {', '.join(known)}")
    chosen: set[str] = set()
    for name in names:
        if name == "all":
            chosen.update(OPTIMISATIONS)
        elif name == "default":
            chosen.update(n for n in OPTIMISATIONS if n not in SLOWER.get(device, ()))
        elif name in FEATURES:
            chosen.add(name)
    return frozenset(chosen)


def resolve(
    requested: str | Iterable[str], *, tensor_parallel: int = 1, device: str = "cpu", serving: bool = True
) -> dict[str, Setting]:
    """Every feature's setting for a request on ``tensor_parallel`` ranks, in registry order.

    serving: whether our runtime calls what is compiled. Without it, what a pass requires of a runtime is the
    caller's to have, and counts as met.

    Raises ValueError for unknown names.
    """
    chosen = expand(requested, device)
    settings: dict[str, Setting] = {}
    for feature in FEATURES.values():  # in order: a requirement stands before what needs it
        callers = feature.by == "pass" and not serving
        missing = [r for r in feature.requires if not callers and not has(r, settings, tensor_parallel)]
        if feature.name not in chosen:
            settings[feature.name] = Setting("off", f"not asked for; the older way: {feature.older}")
        elif missing:
            settings[feature.name] = Setting("inert", f"needs {', '.join(missing)}")
        else:
            settings[feature.name] = Setting("on", "asked for")
    return settings


def subsets(tensor_parallel: int = 1) -> Iterator[frozenset[str]]:
    """Every set of features in which none is inert on so many ranks, smaller ones first."""
    for size in range(len(FEATURES) + 1):
        for chosen in combinations(FEATURES, size):
            settings = resolve(chosen, tensor_parallel=tensor_parallel)
            if all(settings[name].on for name in chosen):
                yield frozenset(chosen)


def has(requirement: str, settings: dict[str, Setting], tensor_parallel: int) -> bool:
    """Whether a requirement is met by the settings made so far."""
    if requirement == TENSOR_PARALLEL:
        return tensor_parallel > 1
    return settings[requirement].on


def nearest(name: str, known: Iterable[str]) -> str:
    """' (did you mean ...?)', or nothing where no known name is close."""
    close = get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
