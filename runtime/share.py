"""How much of a step one long prompt may take when others want rows too.

    budget 2048     prompts of 32000, 32000 and 48 tokens  ->  1000, 1000, 48
                    the same prompt twice                  ->  2048: the second waits for the first's

Plain Python without torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from .budget import Limits
from .cache.cache import Cache
from .cache.checkpoints import last_hit
from .request import Request

MOST_WAITS = 32  # requests that are passed over in a plan because they wait for a prefix: looking costs time


def share_of(limits: Limits, cache: Cache, running: Sequence[Request], waiting: Sequence[Request]) -> int:
    """The most rows for a prompt longer than a step. waiting: those there is a place for, in their order."""
    budget = limits.step_budget
    longest = max((r.unseen for part in (running, waiting) for r in part if r.again is None), default=0)
    if longest <= budget:
        return budget
    unseen = [r.unseen for r in running]
    pages, coming, waits = cache.available, Coming(cache), 0
    for request in running:
        coming.add(request, request.seen, cache.junction(request))
    for request in waiting:
        hit, _, _ = found = cache.match(request)
        pages -= cache.pages_for(len(request.tokens)) - cache.pages_for(hit)
        if pages < 0 or waits == MOST_WAITS:
            break
        if coming.holds_more_of(request, hit):
            waits += 1
        else:
            unseen.append(len(request.tokens) - hit)
            coming.add(request, hit, found.junction)
    return fair_share(limits, unseen)


class Coming:
    """The next prefixes that each prompt under way will leave in the cache: whoever needs one of them waits
    for it and takes no rows meanwhile.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._keys: dict[int, set[bytes]] = {}  # by token count

    def add(self, request: Request, seen: int, junction: int = 0) -> None:
        """Count a request in that goes on from ``seen`` and leaves a state at its ``junction`` (0: none)."""
        grid, known = self._cache.grid, len(request.tokens)
        if grid is None or known - seen <= 1:
            return
        last, place = last_hit(known, grid.unit), (seen // grid.block + 1) * grid.block
        if place > last or not self._cache.keeps(request, place):
            place = last
        for tokens in {place, junction}:
            if seen < tokens <= last:
                key = self._cache.chain(request).key(tokens // grid.unit)
                self._keys.setdefault(tokens, set()).add(key)

    def holds_more_of(self, request: Request, hit: int) -> bool:
        """Whether one of the prefixes is the request's and longer than its ``hit``."""
        unit = self._cache.grid.unit if self._cache.grid else 1
        longest = last_hit(len(request.tokens), unit)
        return any(
            hit < place <= longest and self._cache.chain(request).key(place // unit) in keys
            for place, keys in self._keys.items()
        )


def fair_share(limits: Limits, unseen: Sequence[int]) -> int:
    """The most rows for a prompt longer than a step, when requests with so many unseen tokens share it."""
    budget = limits.step_budget
    if len(unseen) < 2 or max(unseen) <= budget:
        return budget
    prompts = [u for u in unseen if u > 1]
    rows = budget - len(unseen) * limits.row_charge - (len(unseen) - len(prompts))
    fair = rows // len(prompts)
    light = [u for u in prompts if u <= fair]
    least = min(limits.long_prefill_tokens, budget // 2)
    return max((rows - sum(light)) // (len(prompts) - len(light)), least, 1)
