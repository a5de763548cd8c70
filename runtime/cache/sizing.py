"""How many pages a byte budget buys, exactly, and what the numbers are.

    slots   0 | 1 .............. R | R+1 ..........       null, those of requests, kept states of prefixes
    bytes = slots * slot_bytes + record_slots * record_bytes + num_pages * page_bytes      nothing is rounded

Bytes are over all layers. They are measured on small pools, so they are right for any model, dtype and
layout, and on any rank: where ranks share the tokens of a page, it takes each its part. A prefix is kept as
pages and, every ``block_size`` tokens, a state: both are bought together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from ..engine_config import DEFAULT_CACHE_BYTES, EngineConfig
from .checkpoints import block_size
from .pools import KdaPools, MlaPools

CHUNK = 64  # tokens after which a state can be written inside a chunk: the grid of kda_prefill_export
FEWEST_CHECKPOINTS = 4
CACHED = 4  # how many times the pages of the running requests a prefix cache gets where no budget says

MakePools = Callable[..., Sequence[Iterable[Tensor]]]  # slots, pages, page size, drafts, record slots


class Bytes(NamedTuple):
    """What one of each takes. ``layer_*``: in the layer that takes most, for the size of a block."""

    slot: int  # state and conv window, over all layers
    records: int  # of the last verify step of a slot, over all layers
    page: int  # over all layers
    layer_slot: int
    layer_page: int


@dataclass(frozen=True)
class PoolSizes:
    """What the pools of a model hold. Numbers include the null page and slot.

    num_slots: the null slot and those that requests live in, slots_per_request each. num_checkpoints: the
    slots above them. record_slots: the first slots, which have records. block_size: tokens from one kept
    state to the next, 0 without a prefix cache. kept_of_page: of a page's tokens, those whose latents this
    rank keeps; the others of its context group keep as many.
    """

    num_slots: int
    num_checkpoints: int
    record_slots: int
    num_pages: int
    page_size: int
    block_size: int
    num_drafts: int
    slots_per_request: int
    bytes: Bytes
    max_model_len: int
    kept_of_page: int

    @property
    def total_slots(self) -> int:
        """Rows of the state pools."""
        return self.num_slots + self.num_checkpoints

    @property
    def total_bytes(self) -> int:
        """Bytes of all pools together."""
        states = self.total_slots * self.bytes.slot + self.record_slots * self.bytes.records
        return states + self.num_pages * self.bytes.page

    @property
    def tokens(self) -> int:
        """Tokens that fit in the pages that requests may own."""
        return (self.num_pages - 1) * self.page_size

    @property
    def request_bytes(self) -> int:
        """Bytes of state and records that a request owns however long it is."""
        replays = self.record_slots > 0
        return self.slots_per_request * self.bytes.slot + (self.bytes.records if replays else 0)

    def __str__(self) -> str:
        kept = f" and {self.num_checkpoints} for prefixes" if self.block_size else ""
        line = (
            f"pools: {self.num_pages} pages x {self.page_size} tokens ({self.bytes.page:,} B each, "
            f"{self.tokens:,} tokens), {self.num_slots} state slots{kept} ({self.bytes.slot:,} B each), "
            f"{self.total_bytes:,} B in all; max_model_len {self.max_model_len:,}"
        )
        return "; ".join([line, *self._of_ranks(), *self._of_blocks(), *self._of_drafts()])

    def _of_ranks(self) -> list[str]:
        """Which tokens of a page are here, where ranks share them."""
        ranks = self.page_size // self.kept_of_page
        return [f"each of {ranks} ranks keeps {self.kept_of_page} tokens of a page"] if ranks > 1 else []

    def _of_blocks(self) -> list[str]:
        return [f"a state is kept every {self.block_size:,} tokens"] if self.block_size else []

    def _of_drafts(self) -> list[str]:
        """What a request takes for its drafts, and what it would take the other way."""
        if not self.num_drafts:
            return []
        states = self.num_drafts + 1
        ways = [
            f"1 state and the records of {states} rows, {self.bytes.slot + self.bytes.records:,} B",
            f"{states} states, {states * self.bytes.slot:,} B",
        ]
        own, other = ways if self.record_slots else reversed(ways)
        return [f"for {self.num_drafts} drafts a request owns {own} ({other} the other way)"]


def measure(make_pools: MakePools, page_size: int, num_drafts: int) -> Bytes:
    """Bytes of one slot, of its records and of one page: what one more of each adds."""

    def bytes_of(slots: int, pages: int, record_slots: int) -> list[int]:
        return list(map(layer_bytes, make_pools(slots, pages, page_size, num_drafts, record_slots)))

    one, slot, records, page = (bytes_of(*sizes) for sizes in ((1, 1, 1), (2, 1, 1), (2, 1, 2), (1, 2, 1)))
    slot, records, page = (
        [more - less for more, less in zip(a, b)] for a, b in ((slot, one), (records, slot), (page, one))
    )
    return Bytes(sum(slot), sum(records), sum(page), max(slot), max(page))


def kept_of_page(make_pools: MakePools, page_size: int) -> int:
    """Tokens of a page that this rank keeps; a draft keeps them all, whatever the model does."""
    latents = [layer.pages for layer in make_pools(1, 1, page_size, 0, 0) if isinstance(layer, MlaPools)]
    return min((pages.shape[1] for pages in latents), default=page_size)


def pool_bytes(pools: Sequence[Iterable[Tensor]]) -> int:
    """Bytes of all tensors of all layers."""
    return sum(map(layer_bytes, pools))


def layer_bytes(layer: Iterable[Tensor] | KdaPools | MlaPools) -> int:
    """Bytes of the tensors of one layer."""
    return sum(t.numel() * t.element_size() for t in layer)


def size_pools(config: EngineConfig, make_pools: MakePools, model_max: int) -> PoolSizes:
    """Choose the number of pages and of kept states and the longest request, ``model_max`` being what the
    model was made for.

    Raises ValueError when the budget does not hold the slots and one page, or max_model_len does not fit.
    """
    each = measure(make_pools, config.page_size, config.num_drafts)
    if config.max_model_len is not None and config.max_model_len > model_max:
        raise ValueError(f"max_model_len={config.max_model_len}, but the model's context is {model_max}")
    longest = config.max_model_len or model_max
    sizes = PoolSizes(
        num_slots=config.num_slots,
        num_checkpoints=0,
        record_slots=config.num_slots if config.state_replay and config.num_drafts else 0,
        num_pages=0,
        page_size=config.page_size,
        block_size=block_of(config, each),
        num_drafts=config.num_drafts,
        slots_per_request=config.slots_per_request,
        bytes=each,
        max_model_len=0,
        kept_of_page=kept_of_page(make_pools, config.page_size),
    )
    return pages_within(config, sizes, longest)


def block_of(config: EngineConfig, each: Bytes) -> int:
    """Tokens from one kept state to the next, 0 without a prefix cache: what was asked, or as many as take in
    an MLA layer the bytes of a state of a KDA layer.

    Raises ValueError for a size that hits could not end at.
    """
    if not config.prefix_cache:
        return 0
    if config.block_size is not None:
        return config.block_size
    unit = config.prefix_match_unit or 1
    alignment = math.lcm(CHUNK, config.page_size, unit)
    token_bytes = max(each.layer_page // config.page_size, 1)
    block = block_size(max(each.layer_slot, 1), token_bytes, alignment)
    kept = config.retention_interval
    if kept and kept % block:
        raise ValueError(f"retention_interval={kept} is no multiple of the block of {block} tokens")
    return block


def unit_of(config: EngineConfig, block: int) -> int:
    """Tokens to which a hit is exact: what was asked, or the least on which a state inside a pass can fall,
    where blocks are whole multiples of it. Finer hits run fewer tokens twice and cost a hash more each.
    """
    finest = math.lcm(CHUNK, config.page_size)
    return config.prefix_match_unit or (finest if block % finest == 0 else block)


def pages_within(config: EngineConfig, sizes: PoolSizes, longest: int) -> PoolSizes:
    """Fill in pages, checkpoints and the longest request."""
    budget = config.kv_cache_bytes or DEFAULT_CACHE_BYTES
    if config.num_pages is not None:
        sizes = with_pages(config, sizes, config.num_pages)
    else:
        running = config.max_num_seqs * -(-longest // config.page_size)
        useful = running * (CACHED if config.prefix_cache else 1) + 1
        most = useful if config.kv_cache_bytes is None else budget // max(sizes.bytes.page, 1)
        low, high = 0, max(most, 0)
        while low < high:  # the most pages that fit with the checkpoints that go with them
            middle = (low + high + 1) // 2
            if with_pages(config, sizes, middle).total_bytes <= budget:
                low = middle
            else:
                high = middle - 1
        sizes = with_pages(config, sizes, low)
        if low < 2:
            raise ValueError(
                f"kv_cache_bytes={budget:,} does not hold {sizes.total_slots} state slots of "
                f"{sizes.bytes.slot:,} B, {sizes.record_slots} records of {sizes.bytes.records:,} B and 2 "
                f"pages of {sizes.bytes.page:,} B: raise it or lower max_num_seqs"
            )
    if config.max_model_len is not None and config.max_model_len > sizes.tokens:
        raise ValueError(
            f"max_model_len={config.max_model_len}, but {sizes.num_pages} pages of {config.page_size} hold "
            f"{sizes.tokens} tokens beside the null page: give more pages or a smaller max_model_len"
        )
    return replace(sizes, max_model_len=min(longest, sizes.tokens))


def with_pages(config: EngineConfig, sizes: PoolSizes, num_pages: int) -> PoolSizes:
    """So many pages and the checkpoints that go with them: one a block, a few at least."""
    if not sizes.block_size:
        kept = 0
    elif config.num_checkpoints is not None:
        kept = config.num_checkpoints
    else:
        fewest = max(FEWEST_CHECKPOINTS, config.max_num_seqs)  # a request that decodes takes one along
        kept = max(num_pages * sizes.page_size // sizes.block_size, fewest)
    return replace(sizes, num_pages=num_pages, num_checkpoints=kept)
