"""Who drafts for an engine: a DSpark draft where there is one, n-grams otherwise, nobody without drafts.

pools of an engine   [ one a target layer ........ | one a draft layer ..... ]
                       state by slot, latents by page   latents by the same page numbers
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..cache.pools import KdaPools, MlaPools
from ..cache.sizing import MakePools
from ..engine_config import EngineConfig
from .draft import Drafter
from .dspark import DSparkDrafter
from .dspark_model import DSparkModel
from .ngram import NgramDrafter

Pools = Sequence[KdaPools | MlaPools]


def with_draft(model: Any, draft: DSparkModel | None) -> MakePools:
    """``model.make_pools`` with the draft's pages behind: sized, cleared and stored as the others are."""
    if draft is None:
        return model.make_pools

    def make_pools(num_slots: int, num_pages: int, page_size: int, *more: int) -> Pools:
        pages = draft.make_pools(num_pages, page_size)
        return [*model.make_pools(num_slots, num_pages, page_size, *more), *pages]

    return make_pools


def targets_own(pools: Pools, draft: DSparkModel | None) -> Pools:
    """The pools that the target's layers advance: all but the draft's."""
    return pools[: len(pools) - len(draft.layers)] if draft is not None else pools


def make_drafter(model: Any, draft: DSparkModel | None, pools: Pools, config: EngineConfig) -> Drafter | None:
    """What proposes ``config.num_drafts`` tokens a request; ``pools`` are all of the engine's.

    Raises ValueError for more drafts than the draft was made for, or for a model without its taps.
    """
    if not config.num_drafts:
        return None
    if draft is None:
        return NgramDrafter(config.num_drafts)
    return DSparkDrafter(
        draft, model, pools[len(pools) - len(draft.layers) :], config.num_drafts, config.draft_sampling
    )
