"""Random traffic through eight ranks, with clients that abort and hang up: all ranks make the same
collectives in the same order, and nothing is left on any of them.
"""

import os

import pytest
from rank_pool import RankPool
from rank_random import with_engine, with_server
from rank_serving import ALL, Way

pytestmark = [pytest.mark.slow, pytest.mark.tp]
FULL = bool(os.environ.get("K3_ACCEPT"))  # every check at its full count
COUNT = 500 if FULL else 40
PLAIN = Way(ALL, compiled=False, wide=True, drafts="ngram")
WAYS = {
    "n-grams": PLAIN,
    "a draft model and context groups": Way(ALL, compiled=FULL, wide=True, drafts="dspark", context=2),
    "few pages, no prefixes": Way(compiled=False, wide=True, prefix_cache=False, few_pages=True),
}
JOB_S = 590.0


@pytest.fixture(scope="module")
def pool():
    with RankPool(8) as made:
        yield made


def check(seen, count: int) -> None:
    """The ranks are alike, and have nothing left."""
    first = seen[0]
    assert first.collectives
    for rank, one in enumerate(seen):
        assert one.commands == first.commands, f"rank {rank}"
        assert one.collectives == first.collectives, f"rank {rank}"
        assert one.leaked == 0, f"rank {rank}"
    assert first.counted["steps"] > count / 12


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", WAYS if FULL else ["n-grams"])
def test_aborts_between_and_during_steps_leave_eight_ranks_alike(pool, name):
    seen = pool.run(with_engine, WAYS[name], COUNT, 7, timeout_s=JOB_S)
    check(seen, COUNT)
    counted = seen[0].counted
    assert counted["abort"] > COUNT // 20
    assert sum(counted.get(end, 0) for end in ("abort", "length", "stop")) == COUNT


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", WAYS if FULL else ["n-grams"])
def test_clients_that_hang_up_leave_eight_ranks_alike(pool, name):
    seen = pool.run(with_server, WAYS[name], COUNT, 8, timeout_s=JOB_S)
    check(seen, COUNT)
    counted = seen[0].counted
    assert counted["hang up"] + counted["leave"] > COUNT // 5
    assert counted["read"] + counted["hang up"] + counted["leave"] == COUNT
