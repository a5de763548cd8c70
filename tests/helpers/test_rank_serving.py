"""What the checks over ranks are worth: a fault of one rank is seen."""

import pytest
import torch
from k3compile.runtime.weights import load_model
from rank_faults import forgets_to_poison, rounds_otherwise, sums_once_more
from rank_pool import RankFailed, RankPool
from rank_serving import Way, serve_way
from rank_traffic import alone, traffic, wrong

from k3compile.cli.loading import SHIPPED

pytestmark = [pytest.mark.slow, pytest.mark.tp]
WAY = Way(compiled=False, drafts="ngram")


@pytest.fixture(scope="module")
def known():
    return alone(load_model(SHIPPED, torch.float64), traffic(3))


@pytest.fixture
def pool():
    with RankPool(2) as made:
        yield made


def test_ranks_without_a_fault_are_alike_and_right(pool, known):
    seen = pool.run(serve_way, WAY, known)
    assert not wrong(known, seen[0].answers)
    assert seen[0].collectives == seen[1].collectives
    assert seen[0].commands == seen[1].commands
    assert [one.leaked for one in seen] == [0, 0]


def test_a_rank_that_rounds_otherwise_is_seen_in_the_probabilities(pool, known):
    seen = pool.run(rounds_otherwise, WAY, known)
    assert wrong(known, seen[0].answers)


def test_a_rank_that_keeps_what_was_freed_is_seen_in_its_pools(pool, known):
    seen = pool.run(forgets_to_poison, WAY, known)
    assert seen[0].leaked == 0
    assert seen[1].leaked > 0


def test_a_rank_that_makes_another_collective_is_seen_at_the_next_command(pool, known):
    with pytest.raises(RankFailed, match=r"Mark\(count=\d+, digest=\d+\) here"):
        pool.run(sums_once_more, WAY, known, timeout_s=60)
