"""How an engine is sized and how it schedules: every setting checked once, at the start."""

from __future__ import annotations

from dataclasses import dataclass

from .budget import DraftCost, Limits

DEFAULT_CACHE_BYTES = 1 << 30


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine. Raises one ValueError that lists every contradiction.

    max_num_batched_tokens: token rows of one step. max_num_seqs: requests that run at once; each owns a
    state slot. page_size: tokens of a latent page. num_pages: latent pages, the null page among them.
    kv_cache_bytes: instead of num_pages, bytes for latents and state together (neither: up to 1 GiB, no more
    than max_num_seqs requests of max_model_len can use). max_model_len: prompt and output of one request
    (None: what the model and the pages allow). num_drafts: drafts a request may have verified in a step.
    draft_limit: rows of one draft pass (None: max_num_batched_tokens). adaptive_budget: charge drafts only
    for requests in the step. long_prefill_tokens: the least chunk of a prompt that is longer than a step,
    when several share it. granule: prefill chunks end on its multiples where they can. max_waiting: requests
    in the queue before submit refuses. poison: fill freed pages and slots with NaN (debugging).
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 16
    page_size: int = 64
    num_pages: int | None = None
    kv_cache_bytes: int | None = None
    max_model_len: int | None = None
    num_drafts: int = 0
    draft_limit: int | None = None
    adaptive_budget: bool = True
    long_prefill_tokens: int = 256
    granule: int = 1
    max_waiting: int = 1024
    poison: bool = False

    def __post_init__(self) -> None:
        least = {"page_size": 1, "num_drafts": 0, "max_waiting": 1, "num_pages": 2, "kv_cache_bytes": 1}
        wrong = [
            f"{name} must be at least {low}, got {value}"
            for name, low in least.items()
            if (value := getattr(self, name)) is not None and value < low
        ]
        if self.num_pages is not None and self.kv_cache_bytes is not None:
            wrong.append("num_pages and kv_cache_bytes size the same thing: give one of them")
        try:
            self.limits(self.max_model_len or 1 << 40)
        except ValueError as error:
            wrong.append(str(error))
        if wrong:
            raise ValueError("; ".join(wrong))

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
            granule=self.granule,
        )

    @property
    def num_slots(self) -> int:
        """State slots, the null slot among them."""
        return self.max_num_seqs + 1
