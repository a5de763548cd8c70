"""Drafts measured: figures from counts, prompts of every kind, both engines in turn."""

import json

import pytest
from k3compile.runtime.checkpoint import make_checkpoint

from k3compile.bench.limits import Sample
from k3compile.bench.recall_tasks import TASKS, WORDS
from k3compile.bench.speculate import Level, SpeculateResult, bench, gained, prompt_ids, table


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("made") / "tiny", "tiny", 0)


def test_figures_come_from_counts_and_medians():
    level = Level(4, Sample((2.0, 2.0, 4.0)), Sample((1.0, 1.0, 1.0)))
    result = SpeculateResult("m", "drafts", 0.0, verified=10, accepted=(9, 6, 0), levels=(level,))
    assert result.mean_length == 2.5
    assert result.by_position == [0.9, 0.6, 0.0]
    assert (level.speedup, level.worst) == (2.0, 2.0)
    told = json.loads(json.dumps(result.to_json()))
    assert told["levels"]["4"]["speedup"] == 2.0
    made = table(result)
    assert made.row_count == 1
    assert "mean accepted length 2.50; accepted by position 0.90 0.60 0.00" in made.caption


def test_nothing_verified_is_no_division_by_zero():
    assert SpeculateResult("m", "none", 0.0, 0, (), ()).mean_length == 1.0


def test_counts_may_have_grown_by_positions():
    assert gained((), (3, 1)) == (3, 1)
    assert gained((3, 1), (5, 1, 1)) == (2, 0, 1)


def test_without_prompts_there_are_problems_of_every_kind_in_turn(tiny):
    ids = prompt_ids(tiny, [])
    assert len(ids) == 8 * len(TASKS)
    assert len({tuple(one) for one in ids}) > len(ids) // 2
    assert prompt_ids(tiny, ["Hello", "Bye"]) != prompt_ids(tiny, ["Bye", "Hello"])


@pytest.mark.slow
def test_both_ways_are_served_and_drafts_are_counted(tiny):
    many = " ".join([*WORDS, *map(chr, range(33, 127))])  # random weights say some of it again
    result = bench(tiny, [many], num_drafts=2, levels=(1, 2), tokens=12, rounds=2, compiled=False)
    assert [level.concurrency for level in result.levels] == [1, 2]
    assert all(len(level.plain.values) == len(level.drafted.values) == 2 for level in result.levels)
    assert "n-grams" in result.drafts
    assert result.verified > 0
    assert 1.0 <= result.mean_length <= 3.0


def test_counts_below_one_are_refused_together(tiny):
    with pytest.raises(ValueError, match="tokens must be at least 1, got 0; rounds must be"):
        bench(tiny, tokens=0, rounds=0)
