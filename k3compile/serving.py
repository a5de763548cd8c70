"""From feature names and what a workload asks for to everything that serves it.

    features       default, all, baseline, plain, names    optimisations: what a benchmark switches off
    prefix_cache   num_drafts   offload_...                capabilities: what the workload needs
    ranks          context ranks                           the launch: how many share it
         |
         +--> EngineConfig     adaptive_budget and state_replay as the features say
         +--> CompileOptions   features and capabilities, so that no pass takes itself for inert
         +--> draft            folder of a DSpark draft; with drafts and without a folder: n-grams
         +--> warnings         what was asked for and cannot act

The server, the offline door, the benches and the identity tests all come through here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from .features import CAPABILITIES, FEATURES, OPTIMISATIONS, Setting, resolve
from .options import CompileOptions
from .runtime.engine_config import EngineConfig

SET_BY_FEATURES = ("adaptive_budget", "state_replay")  # fields of EngineConfig that are optimisations
DRAFT_FOLDER = "draft"  # of a checkpoint
DRAFT_TYPE = "k3_dspark"
OF_PREFIX_CACHE = ("block_size", "prefix_match_unit", "retention_interval", "num_checkpoints")
OF_DRAFTS = ("draft_sampling", "verification")


@dataclass(frozen=True)
class Serving:
    """What to serve with. ``settings``: every feature's, in registry order. ``warnings``: one line each.

    draft: the folder of a DSpark draft. None with ``engine.num_drafts`` above 0: an n-gram draft. ranks,
    context_ranks: that share the model, and of them those that share the latents of one token.
    """

    engine: EngineConfig
    options: CompileOptions
    settings: dict[str, Setting]
    draft: Path | None
    warnings: tuple[str, ...]
    ranks: int = 1
    context_ranks: int = 1

    def lines(self) -> list[str]:
        """What an operator should read at the start."""
        on = [name for name, setting in self.settings.items() if setting.on]
        inert = [f"{n} ({s.reason})" for n, s in self.settings.items() if s.state == "inert"]
        off = [name for name in OPTIMISATIONS if self.settings[name].state == "off"]
        said = [f"features on: {', '.join(on) or 'none'}"]
        said += [f"inert: {', '.join(inert)}"] if inert else []
        said += [f"off: {', '.join(off)}"] if off else []
        shared = f"{self.ranks} ranks share every layer, {self.context_ranks} the latents of a token"
        return ["; ".join(said), f"drafts: {self.drafts()}", *([shared] if self.ranks > 1 else [])]

    def drafts(self) -> str:
        """How many drafts and from where, in words."""
        count, rule = self.engine.num_drafts, self.engine.verification
        if not count:
            return "none"
        source = "n-grams of the request's own tokens, as there is no draft checkpoint"
        if self.draft is not None:
            source = f"the DSpark draft in {self.draft}"
        chosen = ", as many as pay" if self.engine.adaptive_verification else ""
        return f"up to {count} a request from {source}; verified by the {rule} rule{chosen}"


def plan(
    engine: EngineConfig,
    options: CompileOptions | None = None,
    *,
    checkpoint: Path | None = None,
    draft: Path | None = None,
    compiled: bool = True,
    ranks: int = 1,
    context_ranks: int = 1,
) -> Serving:
    """Settle who does what. Raises one ValueError that lists every contradiction.

    engine: the capabilities; its fields of SET_BY_FEATURES are overwritten. options: ``features`` are the
    optimisations (None: default). checkpoint: may hold a draft in a folder of that name. draft: a draft
    folder to use instead. compiled: whether the passes will run. ranks: that share the model.
    context_ranks: over which the latents of a request are dealt out, 1 where each rank keeps them all.
    """
    options = options or CompileOptions()
    given = (options.features,) if isinstance(options.features, str) else options.features
    has = capabilities(engine, context_ranks)
    problems = rank_problems(engine, ranks, context_ranks)
    if wrong := [*contradictions(given, engine, has), *draft_problems(engine, draft), *problems]:
        raise ValueError("; ".join(wrong))
    asked = tuple(dict.fromkeys((*given, *has)))
    settings = resolve(asked, tensor_parallel=ranks)
    acts = {name: settings[name].state != "off" for name in SET_BY_FEATURES}
    if draft is None and engine.num_drafts and checkpoint is not None:
        found = checkpoint / DRAFT_FOLDER
        draft = found if (found / "config.json").is_file() else None
    return Serving(
        replace(engine, **acts),
        replace(options, features=asked) if len(asked) > len(given) else options,
        settings,
        draft,
        (*idle_features(given, settings, compiled), *idle_settings(engine, draft)),
        ranks,
        context_ranks,
    )


def capabilities(engine: EngineConfig, context_ranks: int = 1) -> tuple[str, ...]:
    """The capabilities that an engine's settings, and how its ranks were started, ask for."""
    asked = {
        "prefix_cache": engine.prefix_cache,
        "speculate": engine.num_drafts > 0,
        "offload": engine.offload_host_bytes > 0 or engine.offload_dir is not None,
        "context_parallel": context_ranks > 1,
    }
    return tuple(name for name in CAPABILITIES if asked.get(name))


SWITCHED_BY = {
    "prefix_cache": "prefix_cache is off",
    "speculate": "num_drafts is 0",
    "offload": "there is neither offload_host_bytes nor offload_dir",
    "context_parallel": "the latents are not dealt out: say over how many ranks with --dcp, 2 or more",
}


def contradictions(given: Iterable[str], engine: EngineConfig, has: tuple[str, ...]) -> list[str]:
    """What was asked for and refused in the same breath."""
    wrong = [
        f"features names {name}, but {SWITCHED_BY[name]}"
        for name in given
        if name in SWITCHED_BY and name not in has
    ]
    if engine.adaptive_verification and not engine.num_drafts:
        wrong.append("adaptive_verification chooses among drafts, but num_drafts is 0")
    return wrong


def rank_problems(engine: EngineConfig, ranks: int, context_ranks: int) -> list[str]:
    """What so many ranks cannot do; what they cannot divide depends on the model (sharding.py)."""
    wrong = []
    if context_ranks < 1 or ranks % context_ranks:
        fit = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        wrong.append(f"dcp is {context_ranks}, and must divide tp, which is {ranks}: give {fit}")
    if ranks > 1 and (engine.offload_host_bytes or engine.offload_dir is not None):
        wrong.append(
            f"offload with {ranks} ranks is not supported: what leaves the pools would be stored for one "
            "rank alone; leave out offload_host_bytes and offload_dir"
        )
    return wrong


def draft_problems(engine: EngineConfig, draft: Path | None) -> list[str]:
    """Why ``draft`` cannot be used."""
    if draft is None:
        return []
    if not engine.num_drafts:
        return [f"draft is {draft}, but num_drafts is 0: say how many tokens it may propose"]
    if not (draft / "config.json").is_file():
        return [f"draft is {draft}, which has no config.json: give the folder of a DSpark draft"]
    kind = model_type(draft / "config.json")
    if kind not in (None, DRAFT_TYPE):
        said = f"draft is {draft}, whose model_type is {kind!r} and not {DRAFT_TYPE!r}"
        return [f"{said}: give the folder of a DSpark draft"]
    return []


def model_type(path: Path) -> object:
    """What a ``config.json`` says it is; None where it says nothing: its reader will complain."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return raw.get("model_type") if isinstance(raw, dict) else None


def idle_features(given: Iterable[str], settings: dict[str, Setting], compiled: bool) -> list[str]:
    """Features that were named one by one and will do nothing."""
    named = [name for name in given if name in FEATURES]
    told = [f"{n} is asked for and does nothing: {settings[n].reason}" for n in named if not settings[n].on]
    if not compiled:
        passes = [n for n in named if FEATURES[n].by == "pass" and settings[n].on]
        told += [f"{name} is asked for and does nothing: the model is not compiled" for name in passes]
    return told


def idle_settings(engine: EngineConfig, draft: Path | None) -> list[str]:
    """Settings of something that is off."""
    why: dict[str, str] = {}
    if not engine.prefix_cache:
        why |= dict.fromkeys(OF_PREFIX_CACHE, "prefix_cache is off")
    if not engine.num_drafts:
        why |= dict.fromkeys(OF_DRAFTS, "num_drafts is 0")
    elif draft is None:
        why["draft_sampling"] = "n-grams are not drawn"
    given = [name for name in why if getattr(engine, name) != getattr(EngineConfig, name)]
    return [f"{name} is given and does nothing: {why[name]}" for name in given]
