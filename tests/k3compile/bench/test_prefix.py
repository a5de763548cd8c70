"""A conversation measured three ways: what is counted is exact, and the same in every round."""

import json

import pytest

from k3compile.bench.limits import Sample
from k3compile.bench.prefix import PrefixResult, Turn, bench, merged, table
from k3compile.cli.loading import Loaded


def test_rounds_become_one_turn_with_a_sample_of_times():
    assert merged([(8, 4, 4, 1, 0.5), (8, 4, 4, 1, 0.7)]) == Turn(8, 4, 4, 1, Sample((0.5, 0.7)))
    with pytest.raises(AssertionError, match="differs between rounds"):
        merged([(8, 4, 4, 1, 0.5), (8, 0, 8, 1, 0.7)])


def test_the_table_has_a_row_for_each_turn_and_way():
    turns = (Turn(8, 0, 8, 1, Sample((1.0,))), Turn(12, 8, 4, 1, Sample((0.5,))))
    result = PrefixResult(
        "m", "eager", {"none": turns, "prefix_cache": turns}, {"none": 0, "prefix_cache": 1}
    )
    assert table(result).row_count == 4
    assert json.loads(json.dumps(result.to_json()))["turns"]["none"][1]["cached_tokens"] == 8


@pytest.mark.slow
def test_a_later_turn_runs_only_what_is_new_and_an_export_saves_the_passes_of_the_cuts(monkeypatch):
    compile_one = Loaded.compile

    def only_what_exports(self, options):  # what is counted is the same uncompiled
        return compile_one(self, options) if "state_export" in options.features else None

    monkeypatch.setattr(Loaded, "compile", only_what_exports)
    result = bench("tiny", prompt=200, turns=2, more=70, reply=4, rounds=1, prefix_match_unit=64)
    none, cached, exported = (result.turns[way] for way in ("none", "prefix_cache", "state_export"))
    assert [turn.cached for turn in none] == [0, 0]
    assert [turn.rows for turn in none] == [turn.prompt for turn in none] == [200, 274]
    assert [turn.cached for turn in exported] == [turn.cached for turn in cached] == [0, 192]
    assert exported[1].rows == 274 - 192
    assert (exported[0].passes, cached[0].passes) == (1, 3), "cut at the last block and at the last unit"
    assert result.kept["none"] == 0
    assert result.kept["state_export"] > 0


def test_unknown_ways_and_empty_counts_are_refused():
    with pytest.raises(ValueError, match=r"ways are none, prefix_cache, state_export \(unknown: magic\)"):
        bench("tiny", ways=["magic"])
    with pytest.raises(ValueError, match="prompt must be at least 1, got 0; rounds must be"):
        bench("tiny", prompt=0, rounds=0)
