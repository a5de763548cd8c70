"""Whether a model fits, and how large its pools become: one question, one answer, nothing allocated.

    memory * usable = weights + draft + reserve + pools        a rank's; pools get what the others leave
    pools           = size_pools on meta pools                 the function and the layouts of the server

A plan that does not fit says what stands in the way; :mod:`.change` looks for what would remove it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from ..runtime.cache.sizing import MakePools, PoolSizes, size_pools
from ..runtime.config import K3Config
from ..runtime.engine_config import EngineConfig
from ..runtime.parallel.ranks import Ranks
from ..runtime.parallel.sharding import objections
from ..runtime.speculate.dspark_config import DSparkConfig
from ..runtime.speculate.make_drafter import with_draft
from .gpus import GB, Gpu
from .reserve import Reserve, reserve
from .weights import make_draft, make_model, weigh

LEAST_CONTEXT = 8192  # that has to fit where nobody says how long requests are
USABLE = 0.92  # of the memory: what the driver and other processes' contexts leave, with a margin


@dataclass(frozen=True)
class Question:
    """What is to be served on what.

    tp: ranks, one a GPU. dcp: ranks of a context group. engine: its kv_cache_bytes and num_pages are those of
    a rank; neither: all that is left. usable: share of a GPU's memory to plan with. reserve: bytes kept for
    all but weights and pools (None: estimated). dtype: of activations, caches and unpacked matrices.
    """

    config: K3Config
    gpu: Gpu
    tp: int
    engine: EngineConfig
    dcp: int = 1
    draft: DSparkConfig | None = None
    usable: float = USABLE
    reserve: int | None = None
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        wrong = [
            f"{name} must be at least 1, got {n}" for name in ("tp", "dcp") if (n := getattr(self, name)) < 1
        ]
        if not 0.0 < self.usable <= 1.0:
            wrong.append(f"usable is {self.usable}, and must be above 0 and at most 1")
        if self.reserve is not None and self.reserve < 0:
            wrong.append(f"reserve is {self.reserve}, and must be 0 bytes or more")
        most, longest = self.config.max_position_embeddings, self.engine.max_model_len
        if longest is not None and longest > most:
            wrong.append(f"max_model_len={longest}, but the model's context is {most}")
        if self.draft is not None and not 1 <= self.engine.num_drafts <= self.draft.block_size:
            wrong.append(
                f"num_drafts is {self.engine.num_drafts}: this draft proposes 1 to {self.draft.block_size}"
            )
        if wrong:
            raise ValueError("; ".join(wrong))

    @property
    def nodes(self) -> int:
        """The fewest nodes that share the ranks evenly."""
        least = -(-self.tp // self.gpu.per_node)
        return next(n for n in range(least, self.tp + 1) if self.tp % n == 0)

    @property
    def itemsize(self) -> int:
        """Bytes of an activation."""
        return getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class Plan:
    """The answer; bytes are of one rank.

    misfits: what stands in the way, in words; none: it fits. weights: by kind, empty where the model cannot
    be dealt out. room: what pools may take. engine: the question's, with kv_cache_bytes filled in. sizes:
    None where the pools cannot be made.
    """

    question: Question
    misfits: tuple[str, ...]
    weights: dict[str, int]
    reserve: Reserve
    room: int
    engine: EngineConfig
    sizes: PoolSizes | None

    @property
    def fits(self) -> bool:
        return not self.misfits

    @property
    def memory(self) -> int:
        """Bytes that are planned with."""
        return int(self.question.gpu.memory * self.question.usable)

    @property
    def weight_bytes(self) -> int:
        """Of target and draft."""
        return sum(self.weights.values())

    @property
    def needed_context(self) -> int:
        """Tokens of a request that has to fit."""
        asked = self.question.engine.max_model_len
        return asked or min(LEAST_CONTEXT, self.question.config.max_position_embeddings)


def make_plan(question: Question) -> Plan:
    """Answer ``question``."""
    q = question
    undivided = objections(q.config, q.tp, q.dcp, q.engine.page_size, q.draft)
    if undivided:
        return Plan(q, tuple(undivided), {}, Reserve(0, 0, 0), 0, q.engine, None)
    weights = weigh(q.config, q.draft, q.tp, q.dtype)
    kept = reserve(q.config, q.engine, q.tp, q.itemsize) if q.reserve is None else Reserve(q.reserve, 0, 0)
    room = int(q.gpu.memory * q.usable) - sum(weights.values()) - kept.total
    plan = Plan(q, (), weights, kept, room, q.engine, None)
    if room <= 0:
        return replace(plan, misfits=(without_room(plan),))
    return with_pools(plan)


def without_room(plan: Plan) -> str:
    """Weights alone are too much."""
    weights, kept, memory = (size / GB for size in (plan.weight_bytes, plan.reserve.total, plan.memory))
    return (
        f"weights of {weights:,.2f} GB a rank and {kept:,.2f} GB besides are {weights + kept - memory:,.2f} "
        f"GB more than the {memory:,.2f} GB that may be used: nothing is left for pools"
    )


def with_pools(plan: Plan) -> Plan:
    """Size the pools in the room that is left, or in what was asked for."""
    q, engine = plan.question, plan.question.engine
    if engine.num_pages is None and engine.kv_cache_bytes is None:
        engine = replace(engine, kv_cache_bytes=plan.room)
    plan = replace(plan, engine=engine)
    try:
        make_pools = pools_of(q.config, q.draft, Ranks(0, q.tp, "", q.dcp), q.dtype, engine.state_replay)
        sizes = size_pools(engine, make_pools, q.config.max_position_embeddings)
    except ValueError as error:
        return replace(plan, misfits=(f"of the {plan.room / GB:,.2f} GB that are left for pools: {error}",))
    plan, misfits = replace(plan, sizes=sizes), []
    if sizes.total_bytes > plan.room:
        asked, room = sizes.total_bytes / GB, plan.room / GB
        misfits.append(f"pools of {asked:,.2f} GB were asked for, and {room:,.2f} GB are left for them")
    if sizes.max_model_len < plan.needed_context:
        misfits.append(
            f"the pages hold {sizes.tokens:,} tokens, and one request of {plan.needed_context:,} has to fit "
            "(max_model_len may say that requests are shorter)"
        )
    return replace(plan, misfits=tuple(misfits))


@lru_cache(maxsize=64)
def pools_of(
    config: K3Config, draft: DSparkConfig | None, ranks: Ranks, dtype: str, state_replay: bool
) -> MakePools:
    """The engine's make_pools of one rank, on the meta device; it remembers what it made."""
    taps = draft.target_layer_ids if draft is not None else ()
    model = make_model(config, ranks, dtype, state_replay, taps)
    make: Callable[..., Any] = with_draft(
        model, make_draft(draft, ranks, dtype) if draft is not None else None
    )
    return lru_cache(maxsize=64)(make)
