"""How an engine is sized and how it schedules: every setting checked once, at the start."""

from __future__ import annotations

from dataclasses import dataclass, fields
from os import PathLike
from typing import SupportsIndex

from .budget import DraftCost, Limits

DEFAULT_CACHE_BYTES = 1 << 30
MOST_DRAFTS = 16
LEAST = {
    "page_size": 1,
    "max_waiting": 1,
    "num_pages": 2,
    "kv_cache_bytes": 1,
    "block_size": 1,
    "prefix_match_unit": 1,
    "retention_interval": 0,
    "num_checkpoints": 0,
    "num_drafts": 0,
    "offload_host_bytes": 0,
    "offload_disk_bytes": 0,
}
KINDS = {  # as a field is annotated -> in words, and what is taken
    "int": ("a whole number", SupportsIndex),
    "bool": ("True or False", bool),
    "str": ("a text", (str, PathLike)),
}
CHOICES = {"draft_sampling": ("probabilistic", "greedy"), "verification": ("block", "standard")}


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine. Raises one ValueError that lists every contradiction.

    max_num_batched_tokens: token rows of one step. max_num_seqs: requests that run at once; each owns a
    state slot. page_size: tokens of a latent page. num_pages: latent pages, the null page among them.
    kv_cache_bytes: instead of num_pages, bytes for latents and state together (neither: up to 1 GiB, no more
    than max_num_seqs requests of max_model_len can use). max_model_len: prompt and output of one request
    (None: what the model and the pages allow).
    draft_limit: rows of one draft pass (None: max_num_batched_tokens). adaptive_budget: charge drafts only
    for requests in the step. long_prefill_tokens: the least chunk of a prompt that is longer than a step,
    when several share it. max_waiting: requests in the queue before submit refuses. poison: fill freed pages
    and slots with NaN (debugging).

    prefix_cache: keep prefixes and run none of them twice. block_size: tokens from one kept state to the next
    (None: as many as take the bytes of a state). prefix_match_unit: tokens to which a hit is exact, a divisor
    of block_size (None: 64 or more, in whole pages). retention_interval: tokens between the states that stay
    when a prompt is through (None: block_size, 0: only ends of prompts and where prompts part).
    num_checkpoints: slots of kept states (None: in proportion to the pages).

    num_drafts: drafts a request may have verified in a step, 0 to 16. state_replay: verify against one state
    and replay what was accepted, instead of a state for each draft. draft_sampling: probabilistic or greedy.
    verification: block or standard, for sampled requests. adaptive_verification: verify only drafts that pay.

    offload_host_bytes: host memory for prefixes that leave the pools. offload_dir: folder for those that
    leave the host. offload_disk_bytes: how much it may hold (0: 8 GiB).
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 16
    page_size: int = 64
    num_pages: int | None = None
    kv_cache_bytes: int | None = None
    max_model_len: int | None = None
    draft_limit: int | None = None
    adaptive_budget: bool = True
    long_prefill_tokens: int = 256
    max_waiting: int = 1024
    poison: bool = False
    prefix_cache: bool = False
    block_size: int | None = None
    prefix_match_unit: int | None = None
    retention_interval: int | None = None
    num_checkpoints: int | None = None
    num_drafts: int = 0
    state_replay: bool = True
    draft_sampling: str = "probabilistic"
    verification: str = "block"
    adaptive_verification: bool = False
    offload_host_bytes: int = 0
    offload_dir: str | None = None
    offload_disk_bytes: int = 0

    def __post_init__(self) -> None:
        if wrong := self._of_another_kind():  # what follows compares
            raise ValueError("; ".join(wrong))
        wrong = [
            f"{name} must be at least {low}, got {value}"
            for name, low in LEAST.items()
            if (value := getattr(self, name)) is not None and value < low
        ]
        if self.num_pages is not None and self.kv_cache_bytes is not None:
            wrong.append("num_pages and kv_cache_bytes size the same thing: give one of them")
        if not wrong:  # what follows divides
            wrong += self._cache_objections()
        wrong += self._draft_objections()
        try:
            self.limits(self.max_model_len or 1 << 40)
        except ValueError as error:
            wrong += [str(error)] if self.num_drafts >= 0 else []
        if wrong:
            raise ValueError("; ".join(wrong))

    def _of_another_kind(self) -> list[str]:
        """What is no number, switch or text where one is needed."""
        wrong = []
        for field in fields(self):
            value, (kind, *others) = getattr(self, field.name), field.type.split(" | ")
            named, allowed = KINDS[kind]
            fits = isinstance(value, allowed) and (kind == "bool" or not isinstance(value, bool))
            if not fits and not (value is None and "None" in others):
                wrong.append(f"{field.name} must be {named}, got {value!r}")
        return wrong

    def _cache_objections(self) -> list[str]:
        """What is wrong with the sizes of blocks, and with tiers that nothing fills."""
        wrong = []
        block, unit, kept = self.block_size, self.prefix_match_unit, self.retention_interval
        for name in ("block_size", "prefix_match_unit"):
            size = getattr(self, name)
            if self.prefix_cache and size is not None and size % self.page_size:
                wrong.append(f"{name}={size} is no multiple of page_size={self.page_size}: hits fill pages")
        if block is not None and unit is not None and block % unit:
            wrong.append(f"prefix_match_unit={unit} does not divide block_size={block}")
        if kept and block is not None and kept % block:
            wrong.append(f"retention_interval={kept} is no multiple of block_size={block}: no state is there")
        if self.prefix_cache and self.num_checkpoints == 0:
            wrong.append("num_checkpoints=0 leaves prefix_cache nowhere to keep a state: give 1 or more")
        if not self.prefix_cache and (self.offload_host_bytes or self.offload_dir):
            wrong.append("offload keeps what leaves the prefix cache: set prefix_cache, or leave it out")
        if self.offload_disk_bytes and self.offload_dir is None:
            wrong.append(f"offload_disk_bytes={self.offload_disk_bytes:,} without offload_dir: say where")
        return wrong

    def _draft_objections(self) -> list[str]:
        wrong = []
        if self.num_drafts > MOST_DRAFTS:
            wrong.append(f"num_drafts must be 0 (no drafts) to {MOST_DRAFTS}, got {self.num_drafts}")
        for name, known in CHOICES.items():
            if (value := getattr(self, name)) not in known:
                wrong.append(f"{name} must be {' or '.join(known)}, got {value!r}")
        return wrong

    def limits(self, max_model_len: int) -> Limits:
        """The scheduler's part, for requests of at most ``max_model_len`` tokens."""
        return Limits(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            max_model_len=max_model_len,
            draft=DraftCost.of(self.num_drafts),
            draft_limit=self.draft_limit,
            adaptive_budget=self.adaptive_budget,
            long_prefill_tokens=self.long_prefill_tokens,
        )

    @property
    def slots_per_request(self) -> int:
        """State slots that a running request owns: one, or one for each state it may go on from."""
        return 1 if self.state_replay else self.num_drafts + 1

    @property
    def num_slots(self) -> int:
        """State slots that requests live in, and the null slot."""
        return 1 + self.max_num_seqs * self.slots_per_request
