"""From a model to an engine: sizes the pools, prints the numbers, joins the parts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from .cache.cache import Cache
from .cache.checkpoints import Grid
from .cache.sizing import size_pools, unit_of
from .cache.tiers.build import build_tiers
from .engine import Engine, ForwardFn
from .engine_config import EngineConfig
from .speculate.adaptive import make_adaptive
from .speculate.draft import Drafter
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
) -> Engine:
    """An engine for ``model``, not started.

    model: has config (vocab_size, eos_token_ids, max_position_embeddings), make_pools, forward and logits.
    compile_forward: (model, the model's own pools) -> forward; None serves the model as it is. draft: the
    model that proposes config.num_drafts tokens (None: n-grams do). drafter: what proposes instead of both.
    Raises ValueError when the pools do not hold what ``config`` asks, and for a model that was made for
    another ``state_replay``.
    """
    replays = getattr(model, "state_replay", config.state_replay)
    if replays != config.state_replay:
        raise ValueError(f"the model was made with state_replay={replays}, config says {config.state_replay}")
    make_pools = with_draft(model, draft)
    sizes = size_pools(config, make_pools, model.config.max_position_embeddings)
    log.info("%s", sizes)
    config = replace(config, max_model_len=sizes.max_model_len)
    if config.limits(sizes.max_model_len).max_active < config.max_num_seqs:
        active = config.limits(sizes.max_model_len).max_active
        log.info("at most %d requests run at once: a step has no row for more", active)
    pools = make_pools(
        sizes.total_slots, sizes.num_pages, sizes.page_size, config.num_drafts, sizes.record_slots
    )
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
    own = targets_own(pools, draft)
    forward = compile_forward(model, own) if compile_forward else lambda step: model.forward(step, own)
    drafter = drafter or make_drafter(model, draft, pools, config)
    device, vocab_size = device_of(pools), model.config.vocab_size
    settle = settler(own, config.state_replay, cache.holding)
    adaptive = make_adaptive(drafter, forward, model.logits, config, vocab_size, device)
    tiers = build_tiers(config, cache, own, model.config, weights_of(model, draft), pools[len(own) :])
    return Engine(
        forward,
        model.logits,
        cache,
        config,
        vocab_size,
        model.config.eos_token_ids,
        pools=pools,
        device=device,
        speculation=Speculation(drafter, settle, adaptive, (config.num_drafts, vocab_size)),
        tiers=tiers,
    )


def weights_of(*models: Any) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of all weights that what is cached depends on; of models that have any."""
    for index, model in enumerate(models):
        for name, tensor in getattr(model, "named_parameters", list)():
            yield f"{index}.{name}", tensor


def device_of(pools: Any) -> Any:
    """Where the step's tensors must be."""
    return pools[0][0].device
