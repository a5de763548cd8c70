"""The smallest change that makes a plan fit: one setting after the other, each candidate planned anew.

    knob              candidates, the smallest change first
    tp                next larger number of ranks (nearest, where ranks cannot share the model)
    dcp               next larger context group (likewise)
    max_num_seqs      one less, two less, ...
    num_drafts        one less, ... none
    max_model_len     one token less, ...
    max_num_batched_tokens    half, a quarter, ...
    state_replay      on, where it is off

Where nothing but more ranks helps, fewer of them are tried together with each of the others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

from ..runtime.parallel.sharding import objections
from .plan import Plan, Question, make_plan

MOST_RANKS = 256
FEWEST_ROWS = 256  # of a step: smaller ones are no way to serve


class Change(NamedTuple):
    """Settings by name, and the plan that fits with them."""

    settings: dict[str, int | bool]
    plan: Plan


def changed(question: Question, settings: dict[str, int | bool]) -> Question | None:
    """``question`` with other settings; None where they contradict each other."""
    ours = {name: settings[name] for name in ("tp", "dcp") if name in settings}
    engine = {name: value for name, value in settings.items() if name not in ours}
    draft = None if engine.get("num_drafts") == 0 else question.draft
    try:
        return replace(question, **ours, draft=draft, engine=replace(question.engine, **engine))
    except ValueError:
        return None


def smallest_changes(plan: Plan) -> list[Change]:
    """For each setting that alone makes ``plan`` fit, how little of it.

    Where only more ranks do: also the fewest ranks that do together with another setting, if fewer do.
    """
    question = plan.question
    settings = [found for name in KNOBS if (found := smallest(question, name, {}))]
    if any("tp" not in change.settings for change in settings):
        return settings
    enough = settings[0].settings["tp"] if settings else 0
    for tp in takewhile(lambda n: n != enough, KNOBS["tp"](question)):
        others = [name for name in KNOBS if name != "tp"]
        if pairs := [found for name in others if (found := smallest(question, name, {"tp": tp}))]:
            return [*pairs, *settings]
    return settings


def smallest(question: Question, name: str, others: dict[str, int | bool]) -> Change | None:
    """The first candidate of one knob that fits, with ``others`` changed too."""
    base = changed(question, others)
    if base is None:
        return None

    def plan_with(value: int | bool) -> Plan | None:
        asked = changed(question, {**others, name: value})
        return None if asked is None else make_plan(asked)

    def fits(value: int | bool) -> bool:
        plan = plan_with(value)
        return plan is not None and plan.fits

    found = first(KNOBS[name](base), fits)
    if found is None:
        return None
    made = plan_with(found)
    assert made is not None
    return Change({**others, name: found}, made)


def first(candidates: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The first candidate that fits; a long range is halved: there, past one that fits, all do."""
    if not isinstance(candidates, range) or len(candidates) < 32:
        return next((value for value in candidates if fits(value)), None)
    if not fits(candidates[-1]):
        return None
    return candidates[bisect_left(candidates, True, key=fits)]


def more_ranks(question: Question) -> Sequence[int]:
    """Numbers of ranks that can share the model."""
    q = question

    def objected(tp: int) -> list[str]:
        return objections(q.config, tp, q.dcp, q.engine.page_size, q.draft)

    able = [tp for tp in range(1, MOST_RANKS + 1) if tp != q.tp and not objected(tp)]
    if objected(q.tp):
        return sorted(able, key=lambda tp: (abs(tp - q.tp), tp))
    return [tp for tp in able if tp > q.tp]


def larger_groups(question: Question) -> Sequence[int]:
    """Sizes of context groups."""
    q = question
    able = [n for n in range(1, q.tp + 1) if q.tp % n == 0 and q.engine.page_size % n == 0 and n != q.dcp]
    if objections(q.config, q.tp, q.dcp, q.engine.page_size, q.draft):
        return sorted(able, key=lambda n: (abs(n - q.dcp), n))
    return [n for n in able if n > q.dcp]


def shorter(question: Question) -> Sequence[int]:
    """Lengths of requests, where one was asked for."""
    asked = question.engine.max_model_len
    return range(asked - 1, 0, -1) if asked else ()


def fewer_rows(question: Question) -> Sequence[int]:
    """Rows of a step."""
    return list(halves(question.engine.max_num_batched_tokens, FEWEST_ROWS))


def halves(number: int, least: int) -> Iterator[int]:
    while (number := number // 2) >= least:
        yield number


KNOBS: dict[str, Callable[[Question], Sequence[int]]] = {
    "max_num_seqs": lambda q: range(q.engine.max_num_seqs - 1, 0, -1),
    "max_model_len": shorter,
    "num_drafts": lambda q: range(q.engine.num_drafts - 1, -1, -1),
    "state_replay": lambda q: [] if q.engine.state_replay or not q.engine.num_drafts else [True],
    "max_num_batched_tokens": fewer_rows,
    "dcp": larger_groups,
    "tp": more_ranks,
}
