"""From a model to an engine: sizes the pools, prints the numbers, joins the parts.

make_engine      Part + Cache + drafter + .. -> Engine       on rank 0, or the only one
make_follower    Part -> Executor                            on every other rank
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from .cache.cache import Cache
from .cache.checkpoints import Grid
from .cache.sizing import PoolSizes, size_pools, unit_of
from .cache.tiers.build import build_tiers
from .engine import Engine
from .engine_config import EngineConfig
from .executor import Executor, ForwardFn
from .finite import check_finite
from .speculate.adaptive import make_adaptive
from .speculate.draft import Drafter
from .speculate.dspark import DSparkDrafter
from .speculate.dspark_model import DSparkModel
from .speculate.make_drafter import make_drafter, targets_own, with_draft
from .speculate.settle import settler
from .speculate.speculation import Speculation

log = logging.getLogger(__name__)


def make_engine(
    model: Any,
    config: EngineConfig,
    compile_forward: Callable[[Any, Any], ForwardFn] | None = None,
    draft: DSparkModel | None = None,
    drafter: Drafter | None = None,
    lead: Callable[[Executor], Executor] | None = None,
) -> Engine:
    """An engine for ``model``, not started.

    model: has config (vocab_size, eos_token_ids, max_position_embeddings), make_pools, forward and logits.
    compile_forward: (model, the model's own pools) -> forward; None serves the model as it is. draft: the
    model that proposes config.num_drafts tokens (None: n-grams do). drafter: what proposes instead of both.
    lead: on rank 0 of several, makes of this rank's executor one that the followers obey, who come from
    :func:`make_follower` with the same arguments and follow by then. Raises ValueError when the pools do not
    hold what ``config`` asks, for a model that was made for another ``state_replay``, and for one that holds
    NaN or infinity.
    """
    if lead is not None:
        refuse_tiers(config)
    part = make_part(model, config, compile_forward, draft, drafter)
    config, sizes, drafter, own = part.config, part.sizes, part.drafter, part.executor.own
    if config.limits(sizes.max_model_len).max_active < config.max_num_seqs:
        active = config.limits(sizes.max_model_len).max_active
        log.info("at most %d requests run at once: a step has no row for more", active)
    cache = Cache(
        sizes.num_pages,
        sizes.num_slots,
        sizes.page_size,
        poison=config.poison,
        grid=Grid(sizes.block_size, unit_of(config, sizes.block_size)) if sizes.block_size else None,
        num_checkpoints=sizes.num_checkpoints,
        retention_interval=config.retention_interval,
        slots_per_request=config.slots_per_request,
    )
    executor = lead(part.executor) if lead else part.executor
    if isinstance(drafter, DSparkDrafter):
        drafter.through(executor)
    vocab_size = model.config.vocab_size
    settle = settler(executor.write, config.state_replay, cache.holding)
    adaptive = make_adaptive(drafter, executor, config, vocab_size)
    pools = executor.pools
    tiers = build_tiers(config, cache, own, model.config, weights_of(model, draft), pools[len(own) :])
    return Engine(
        executor,
        cache,
        config,
        vocab_size,
        model.config.eos_token_ids,
        speculation=Speculation(drafter, settle, adaptive, (config.num_drafts, vocab_size)),
        tiers=tiers,
    )


def make_follower(
    model: Any,
    config: EngineConfig,
    compile_forward: Callable[[Any, Any], ForwardFn] | None = None,
    draft: DSparkModel | None = None,
) -> Executor:
    """What another rank than 0 hands to ``parallel.follow``: its part, with pools of the sizes of rank 0's.

    All arguments, and what is raised, as for :func:`make_engine`. Sizes follow from the settings and from the
    bytes of this rank's part, which are those of every rank.
    """
    refuse_tiers(config)
    return make_part(model, config, compile_forward, draft).executor


def refuse_tiers(config: EngineConfig) -> None:
    """Raise ValueError where several ranks are to keep what leaves their pools."""
    if config.offload_host_bytes or config.offload_dir is not None:
        raise ValueError(
            "offload_host_bytes and offload_dir would keep rank 0's part of a prefix alone: leave them out, "
            "or serve with one rank"
        )


class Part(NamedTuple):
    """One rank's part of an engine, and what it was made for. config: with max_model_len filled in."""

    executor: Executor
    config: EngineConfig
    sizes: PoolSizes
    drafter: Drafter | None


def make_part(
    model: Any,
    config: EngineConfig,
    compile_forward: Callable[[Any, Any], ForwardFn] | None = None,
    draft: DSparkModel | None = None,
    drafter: Drafter | None = None,
) -> Part:
    """Size the pools, print the numbers and put this rank's model over them."""
    replays = getattr(model, "state_replay", config.state_replay)
    if replays != config.state_replay:
        raise ValueError(f"the model was made with state_replay={replays}, config says {config.state_replay}")
    check_finite(model, draft)
    make_pools = with_draft(model, draft)
    sizes = size_pools(config, make_pools, model.config.max_position_embeddings)
    log.info("%s", sizes)
    config = replace(config, max_model_len=sizes.max_model_len)
    pools = make_pools(
        sizes.total_slots, sizes.num_pages, sizes.page_size, config.num_drafts, sizes.record_slots
    )
    own = targets_own(pools, draft)
    forward = compile_forward(model, own) if compile_forward else lambda step: model.forward(step, own)
    drafter = drafter or make_drafter(model, draft, pools, config)
    blocks = drafter.blocks if isinstance(drafter, DSparkDrafter) else None
    executor = Executor(pools, forward, model.logits, own=own, blocks=blocks, device=device_of(pools))
    return Part(executor, config, sizes, drafter)


def weights_of(*models: Any) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of all weights that what is cached depends on; of models that have any."""
    for index, model in enumerate(models):
        for name, tensor in getattr(model, "named_parameters", list)():
            yield f"{index}.{name}", tensor


def device_of(pools: Any) -> Any:
    """Where the step's tensors must be."""
    return pools[0][0].device
