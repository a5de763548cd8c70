"""How many pages a byte budget buys, exactly, and what the numbers are.

    bytes = num_slots * slot_bytes + num_pages * page_bytes      over all layers; nothing is rounded

The bytes of a slot and of a page are measured on small pools, so they are right for any model, dtype and
layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..engine_config import DEFAULT_CACHE_BYTES, EngineConfig


@dataclass(frozen=True)
class PoolSizes:
    """What the pools of a model hold. Numbers include the null page and slot; bytes are over all layers."""

    num_slots: int
    num_pages: int
    page_size: int
    slot_bytes: int
    page_bytes: int
    max_model_len: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all pools together."""
        return self.num_slots * self.slot_bytes + self.num_pages * self.page_bytes

    @property
    def tokens(self) -> int:
        """Tokens that fit in the pages that requests may own."""
        return (self.num_pages - 1) * self.page_size

    def __str__(self) -> str:
        return (
            f"pools: {self.num_pages} pages x {self.page_size} tokens ({self.page_bytes:,} B each, "
            f"{self.tokens:,} tokens), {self.num_slots} state slots ({self.slot_bytes:,} B each), "
            f"{self.total_bytes:,} B in all; max_model_len {self.max_model_len:,}"
        )


MakePools = Callable[[int, int, int, int], Sequence[Iterable[Tensor]]]  # slots, pages, page size, drafts


def measure(make_pools: MakePools, page_size: int, num_drafts: int) -> tuple[int, int]:
    """Bytes of one slot and of one page over all layers."""
    one = pool_bytes(make_pools(1, 1, page_size, num_drafts))
    slot = pool_bytes(make_pools(2, 1, page_size, num_drafts)) - one
    page = pool_bytes(make_pools(1, 2, page_size, num_drafts)) - one
    return slot, page


def pool_bytes(pools: Sequence[Iterable[Tensor]]) -> int:
    """Bytes of all tensors of all layers."""
    return sum(t.numel() * t.element_size() for layer in pools for t in layer)


def size_pools(config: EngineConfig, make_pools: MakePools, model_max: int) -> PoolSizes:
    """Choose the number of pages and the longest request, ``model_max`` being what the model was made for.

    Raises ValueError when the budget does not hold the slots and one page, or max_model_len does not fit.
    """
    slot_bytes, page_bytes = measure(make_pools, config.page_size, config.num_drafts)
    if config.max_model_len is not None and config.max_model_len > model_max:
        raise ValueError(f"max_model_len={config.max_model_len}, but the model's context is {model_max}")
    longest = config.max_model_len or model_max
    num_pages = config.num_pages
    if num_pages is None:
        useful = config.max_num_seqs * -(-longest // config.page_size) + 1
        budget = config.kv_cache_bytes or DEFAULT_CACHE_BYTES
        num_pages = (budget - config.num_slots * slot_bytes) // max(page_bytes, 1)
        num_pages = num_pages if config.kv_cache_bytes else min(num_pages, useful)
        if num_pages < 2:
            raise ValueError(
                f"kv_cache_bytes={budget:,} does not hold {config.num_slots} state slots of {slot_bytes:,} B "
                f"and 2 pages of {page_bytes:,} B: raise it or lower max_num_seqs"
            )
    tokens = (num_pages - 1) * config.page_size
    if config.max_model_len is not None and config.max_model_len > tokens:
        raise ValueError(
            f"max_model_len={config.max_model_len}, but {num_pages} pages of {config.page_size} hold "
            f"{tokens} tokens beside the null page: give more pages or a smaller max_model_len"
        )
    return PoolSizes(
        config.num_slots, num_pages, config.page_size, slot_bytes, page_bytes, min(longest, tokens)
    )
