"""How many tokens a step may hold.

    static    every step   M - R * extra                  what an engine does that must fit its worst step
    adaptive  this step    M - n * extra                  n = requests that really are in it

M = max_num_batched_tokens, R = max_num_seqs, K drafts a request, ``extra`` = K - 1 rows that its draft adds.
With M 8192, R 1024, K 8 a lone request gets 1024 or 8185 tokens: an 8000-token prompt takes 8 passes or 1.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DraftCost:
    """What drafting costs a request in each step.

    extra_rows: rows of the step's budget beside the request's own tokens. lookahead: rows of the draft
    pass, a launch of its own with its own limit, so the two are never added.
    """

    extra_rows: int = 0
    lookahead: int = 0

    @classmethod
    def of(cls, num_drafts: int) -> DraftCost:
        """A draft of ``num_drafts`` tokens: the anchor row is the request's own, the others are extra."""
        return cls(extra_rows=max(num_drafts - 1, 0), lookahead=num_drafts)


@dataclass(frozen=True)
class Limits:
    """What one step may hold. Raises one ValueError that lists every contradiction.

    max_num_batched_tokens (M), max_num_seqs (R), max_model_len (prompt and output together), draft: the
    price of drafts, draft_limit: rows of one draft pass (None: M), adaptive_budget: which of the two rules
    above, long_prefill_tokens: the least chunk of a prompt longer than a step when several share it (half a
    step at most).
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 16
    max_model_len: int = 4096
    draft: DraftCost = DraftCost()
    draft_limit: int | None = None
    adaptive_budget: bool = True
    long_prefill_tokens: int = 256

    def __post_init__(self) -> None:
        wrong = [f"{name} must be at least 1, got {value}" for name, value in self._counts() if value < 1]
        if not wrong and self.step_budget <= self.row_charge:
            whom = "a request" if self.adaptive_budget else f"for each of {self.max_num_seqs} requests"
            wrong.append(
                f"max_num_batched_tokens={self.max_num_batched_tokens} leaves no token for a prompt: "
                f"drafts reserve {self.draft.extra_rows} rows {whom}"
            )
        if not wrong and self.max_active < 1:
            wrong.append(
                f"draft_limit={self.draft_limit} does not hold one request's look-ahead of "
                f"{self.draft.lookahead} rows"
            )
        if wrong:
            raise ValueError("; ".join(wrong))

    def _counts(self) -> list[tuple[str, int]]:
        names = "max_num_batched_tokens max_num_seqs max_model_len long_prefill_tokens"
        return [(name, getattr(self, name)) for name in names.split()]

    @property
    def step_budget(self) -> int:
        """Rows a step starts with."""
        if self.adaptive_budget:
            return self.max_num_batched_tokens
        return self.max_num_batched_tokens - self.max_num_seqs * self.draft.extra_rows

    @property
    def row_charge(self) -> int:
        """Rows each request of the step costs beside its tokens."""
        return self.draft.extra_rows if self.adaptive_budget else 0

    @property
    def max_active(self) -> int:
        """Requests that may run at once: R, or as many as have a row of the step and room in the draft
        pass.
        """
        active = min(self.max_num_seqs, self.step_budget // (1 + self.row_charge))
        if self.draft.lookahead:
            limit = self.max_num_batched_tokens if self.draft_limit is None else self.draft_limit
            active = min(active, limit // self.draft.lookahead)
        return active
