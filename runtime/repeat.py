"""A request that decodes token after token: its work is the same row in every step.

    plan     the work of the step before        instead of a look at pages, chunk and checkpoint
    judge    a token that ends nothing          instead of a look at every limit
    commit   the token, seen + 1                instead of a look at the blocks that are full
    until    a page or a block is full, or the last token is near: that step goes the long way

The long way gives the same plan; this one is a quarter of its time, and with a thousand requests the plan is
what a GPU would wait for. Whatever else befalls a request (drafts, preemption, its end) drops its work.
"""

from __future__ import annotations

from .budget import Limits
from .cache.cache import Cache
from .work import Work


def end_of_repeats(work: Work, cache: Cache, limits: Limits, lookahead: int) -> int:
    """Token count from which on a request's work has to be looked at again, once it has been committed; 0
    where its next work is another.

    lookahead: page positions that a drafter writes after the last token.
    """
    request = work.request
    if work.count != 1 or not work.samples or work.drafts or request.unseen != 1:
        return 0
    longest = limits.max_model_len
    if request.params.max_tokens is not None:
        longest = min(longest, request.prompt_tokens + request.params.max_tokens)
    # A row at ``seen`` makes token number seen + 2, which must not be the last.
    return min(cache.unchanged_until(request) - lookahead, longest - 2)
