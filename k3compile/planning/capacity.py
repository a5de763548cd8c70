"""How many requests of which length run at once, as a plan stands and at best.

one request of c tokens    1 state (or one for each draft)  +  ceil(c / page) pages
as planned                 slots are there for max_num_seqs, pages for what is left
at best                    max_num_seqs chosen for this length: slots and pages share the room anew
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import NamedTuple

from .plan import Plan, make_plan

CONTEXTS = (2048, 8192, 32768, 131072, 262144, 524288, 1048576)
MOST_REQUESTS = 1 << 14


class Capacity(NamedTuple):
    """Requests of ``context`` tokens that are whole in the pools at once. most: None where the number of
    pages is fixed, which says nothing about what another number of requests would leave.
    """

    context: int
    requests: int
    most: int | None


def capacities(plan: Plan) -> list[Capacity]:
    """For lengths up to what the model was made for; the last one is the longest that this plan takes."""
    assert plan.sizes is not None
    longest = plan.sizes.max_model_len
    lengths = sorted({*(c for c in CONTEXTS if c < longest), longest})
    return [Capacity(c, at_once(plan, c), best(plan, c)) for c in lengths]


def at_once(plan: Plan, context: int) -> int:
    """Requests of so many tokens that the plan's slots, pages and step rows hold."""
    sizes = plan.sizes
    if sizes is None:
        return 0
    pages = -(-context // sizes.page_size)
    limits = plan.engine.limits(sizes.max_model_len)
    return min(limits.max_active, (sizes.num_pages - 1) // pages)


def best(plan: Plan, context: int) -> int | None:
    """The most requests of so many tokens, over all max_num_seqs."""
    asked = plan.question
    if asked.engine.num_pages is not None:
        return None

    def short_of(number: int) -> bool:
        try:
            engine = replace(asked.engine, max_num_seqs=number, max_model_len=context)
        except ValueError:  # a static budget that so many requests use up
            return True
        return at_once(make_plan(replace(asked, engine=engine)), context) < number

    numbers = range(1, min(MOST_REQUESTS, asked.engine.max_num_batched_tokens) + 1)
    return bisect_left(numbers, True, key=short_of)
