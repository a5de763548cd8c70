"""A request and its one counter.

    tokens   [ prompt ................ | output ...... ]
               already in the cache    ^ seen            unseen = len(tokens) - seen

Prefill, chunk, decode and resume are all "run tokens [seen, seen + count)". A request whose prompt is done
has one unseen token, the one sampled last. Preemption sets ``seen`` to 0 and nothing else: prompt and
output are run again.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .speculate.draft import Draft
    from .work import Work

FinishReason = Literal["stop", "length", "abort", "error"]

__all__ = ["FinishReason", "Request", "SamplingParams", "cut"]


class Request:
    """One sequence to continue.

    id: unique among the requests that live at the same time. prompt: token ids, at least one. priority:
    smaller runs first, then the earlier ``arrival`` (seconds, monotonic clock). cache_salt: requests share
    cached prefixes only with those of the same salt. Raises ValueError for an empty prompt and for a salt
    that is no string.
    """

    def __init__(
        self,
        id: str,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        arrival: float | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> None:
        if len(prompt) == 0:
            raise ValueError("prompt is empty: a request needs at least one token")
        if not isinstance(cache_salt, str):
            raise ValueError(f"cache_salt must be a string, got {cache_salt!r}; leave it out for none")
        self.id = id
        self.params = params or SamplingParams()
        self.arrival = time.monotonic() if arrival is None else arrival
        self.priority = priority
        self.tokens = array("q", prompt)
        self.prompt_tokens = len(self.tokens)
        self.seen = 0
        self.cache_salt = cache_salt
        self.cached_tokens = 0  # of the prompt, found in the cache when it was first admitted
        self.drafts: list[int] = []  # proposals to verify in the next step
        self.proposal: Draft | None = None  # where they come from
        self.stop_ids = frozenset(self.params.stop_token_ids)
        self.stops: frozenset[int] = self.stop_ids  # and those of the model
        self.again: Work | None = None  # of the last step, to plan again as it is
        self.again_until = 0  # while fewer tokens than these are seen
        self.finish: FinishReason | None = None
        self.preemptions = 0

    @property
    def prompt(self) -> list[int]:
        """The prompt's token ids."""
        return self.tokens[: self.prompt_tokens].tolist()

    @property
    def output(self) -> list[int]:
        """The token ids generated so far."""
        return self.tokens[self.prompt_tokens :].tolist()

    @property
    def output_tokens(self) -> int:
        """How many tokens were generated."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def room(self) -> int:
        """Tokens that may still be generated, as far as the request itself says."""
        most = self.params.max_tokens
        return 1 << 62 if most is None else most - self.output_tokens

    @property
    def unseen(self) -> int:
        """Tokens known but not yet run through the model."""
        return len(self.tokens) - self.seen

    def propose(self, draft: Draft | None) -> None:
        """Replace the drafts to verify in the next step; None drops them."""
        self.proposal = draft
        self.drafts = [] if draft is None else draft.tokens

    @property
    def rank(self) -> tuple[int, float]:
        """Sorting key of service order."""
        return (self.priority, self.arrival)

    def __repr__(self) -> str:
        state = self.finish or f"seen {self.seen}"
        return f"Request({self.id!r}, {self.prompt_tokens}+{self.output_tokens} tokens, {state})"


def cut(
    request: Request, tokens: Sequence[int], eos_ids: frozenset[int], max_model_len: int
) -> tuple[list[int], FinishReason | None]:
    """Which of a step's new tokens the request keeps, and why it ends there, if it does.

    The tokens are taken one by one, so whichever of a stop id and a limit comes first decides: a stop id in
    the last allowed place is a "stop". The stop id itself is kept (it is delivered as a token and counted).
    Stop ids do not count before ``min_tokens``; the sampler does not choose them there.
    """
    params, known = request.params, len(request.tokens)  # plain arithmetic: once a request and step
    done = known - request.prompt_tokens
    room = max_model_len - known
    if params.max_tokens is not None and params.max_tokens - done < room:
        room = params.max_tokens - done
    kept: list[int] = []
    for count, token in enumerate(tokens, 1):
        kept.append(token)
        is_stop = token in request.stop_ids or (token in eos_ids and not params.ignore_eos)
        if is_stop and done + count > params.min_tokens:
            return kept, "stop"
        if count >= room:
            return kept, "length"
    return kept, None
