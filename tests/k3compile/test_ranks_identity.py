"""Greedy identity over ranks that are processes: whoever shares the trained model, a request gets the tokens
that the model as it is written gives it alone on one rank.

In float64, layers compiled with the inner compiler ``eager``, log-probabilities to 1e-9; in float32
tie-aware. The slow lane runs a slice, K3_ACCEPT=1 every combination.
"""

import os
from itertools import product

import pytest
import torch
from k3compile.runtime.weights import load_model
from rank_pool import RankPool
from rank_serving import ALL, Way, logits_of, serve_way
from rank_traffic import STRANGER, alone, traffic, wrong
from tie_aware import assert_identical

from k3compile.cli.loading import SHIPPED

pytestmark = [pytest.mark.slow, pytest.mark.tp]
FULL = bool(os.environ.get("K3_ACCEPT"))  # every check at its full count
SHAPES = [
    (1, 1),
    (2, 1),
    (4, 1),
    (4, 2),
    (8, 1),
    (8, 2),
    (8, 8),
]  # ranks, of which so many in a context group
NO_REPLAY = tuple(name for name in ALL if name != "state_replay")
SLICE = [
    (1, Way(ALL, drafts="dspark")),
    (2, Way(ALL, drafts="dspark")),
    (2, Way((), drafts="ngram", prefix_cache=False, disturb="abort")),
    (2, Way(NO_REPLAY, compiled=False, drafts="dspark")),
    (2, Way(ALL, compiled=False, few_pages=True)),
    (4, Way(ALL, drafts="ngram", context=2)),
    (8, Way(ALL, drafts="dspark", disturb="abort")),
    (8, Way((), compiled=False, context=8)),
]
EVERY = [
    (ranks, Way(optimised, context=context, drafts=drafts, prefix_cache=cached, disturb=disturb))
    for ranks, context in SHAPES
    for optimised, drafts in product(((), ALL, NO_REPLAY), ("none", "ngram", "dspark"))
    for cached, disturb in ((True, "preempt"), (False, "abort"))
]
# In the order of ranks, since a pool is used while it lasts.
CHOSEN = sorted(dict.fromkeys([*SLICE, *EVERY] if FULL else SLICE), key=lambda one: one[0])
JOB_S = 570.0


def named(ranks: int, way: Way) -> str:
    optimised = {(): "baseline", ALL: "all", NO_REPLAY: "no replay"}[way.optimisations]
    parts = [f"tp{ranks}", f"dcp{way.context}", optimised, way.drafts, way.disturb]
    parts += ["prefixes"] * way.prefix_cache + ["few pages"] * way.few_pages
    return " ".join(parts if way.compiled else [*parts, "as written"])


class Pools:
    """One pool at a time: tests come in the order of their ranks, and a pool keeps what it compiled."""

    def __init__(self) -> None:
        self.pool: RankPool | None = None

    def of(self, ranks: int) -> RankPool:
        if self.pool is not None and (self.pool.ranks != ranks or self.pool.closed):
            self.close()
        self.pool = self.pool or RankPool(ranks)
        return self.pool

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
        self.pool = None


@pytest.fixture(scope="module")
def pools():
    made = Pools()
    yield made
    made.close()


@pytest.fixture(scope="module")
def known():
    """What each request gets alone from the model as it is written."""
    return alone(load_model(SHIPPED, torch.float64), traffic())


def check_together(seen, way: Way, ranks: int) -> None:
    """Every rank made the same collectives and obeyed the same commands, and nothing is left on any."""
    first = seen[0]
    assert [one.leaked for one in seen] == [0] * ranks
    if ranks > 1:
        assert first.collectives
        assert first.commands[-1] == "stop"
        assert ("draft" in first.commands) == (way.drafts == "dspark")
    assert all(one.commands == first.commands for one in seen)
    assert all(one.collectives == first.collectives for one in seen)


def check_acted(counted, applied, way: Way) -> None:
    """What was switched on did something, and what was not did nothing."""
    assert (counted["hits"] > 0) == way.prefix_cache
    assert (counted["proposed"] > 0) == (way.drafts != "none")
    assert (counted["accepted"] > 0) >= (way.drafts == "dspark")
    assert (counted["preempted"] > 0) >= (way.disturb == "preempt")
    assert all(applied.values()) or not way.compiled, applied


@pytest.mark.parametrize(("ranks", "way"), CHOSEN, ids=[named(*one) for one in CHOSEN])
def test_ranks_give_the_tokens_of_the_model_as_it_is_written_alone(pools, known, ranks, way):
    seen = pools.of(ranks).run(serve_way, way, known, timeout_s=JOB_S)
    found = wrong(known, seen[0].answers)
    assert not found, "\n".join(found)
    assert [a.finish for a in seen[0].answers].count("abort") == (way.disturb == "abort")
    assert len(seen[0].answers[STRANGER].tokens) == 1
    check_together(seen, way, ranks)
    check_acted(seen[0].counted, seen[0].applied, way)


@pytest.mark.parametrize("ranks", [8, 4, 2] if FULL else [2])
@pytest.mark.parametrize("optimised", [ALL, ()] if FULL else [ALL], ids=lambda o: "all" if o else "baseline")
def test_in_float32_ranks_differ_at_ties_alone(pools, known, ranks, optimised):
    way = Way(optimised, dtype="float32", prefix_cache=False, drafts="dspark")
    seen = pools.of(ranks).run(serve_way, way, known, timeout_s=JOB_S)
    assert_identical(seen[0].verdicts)
    check_together(seen, way, ranks)
    check_acted(seen[0].counted, seen[0].applied, way)


@pytest.mark.parametrize(("ranks", "context"), SHAPES if FULL else [(2, 1), (4, 2), (8, 8)])
def test_logits_of_whole_prompts_are_those_of_one_rank_on_every_rank(pools, known, ranks, context):
    prompts = [known[i].prompt for i in (0, 1, 5)]
    want = [one.clone() for one in logits_of("float64", 1, prompts)]
    for got in pools.of(ranks).run(logits_of, "float64", context, prompts, timeout_s=JOB_S):
        for mine, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0.0, atol=1e-9)
