"""The attribution of passes: every pass is left out once, and its sites are counted over all layers."""

import dataclasses

import pytest
import torch
from small_models import SMALL_LINEAR, small_model

from k3compile.bench.limits import Sample
from k3compile.bench.passes import PassesResult, Variant, bench, bench_model, pass_names, table, variants_of


def test_every_pass_is_left_out_once_and_all_are_once():
    names = pass_names()
    found = variants_of(names)
    assert found["all"] == ()
    assert found["none"] == tuple(names)
    assert [found[f"-{name}"] for name in names] == [(name,) for name in names]


def test_a_pass_is_worth_what_its_absence_costs():
    def variant(name, prefill, decode):
        return Variant(name, Sample((prefill,)), Sample((decode,)), 1.0)

    without = variant("-contiguous_views", 3.0, 1.0)
    result = PassesResult("m", "eager", 8, (variant("all", 2.0, 2.0), without), {"contiguous_views": 8}, {})
    assert result.worth(without) == (1.5, 0.5)
    assert result.to_json()["variants"]["-contiguous_views"]["prefill_ratio"] == 1.5
    assert table(result).row_count == 2


@pytest.mark.slow
def test_sites_are_counted_over_all_layers():
    config = dataclasses.replace(SMALL_LINEAR, num_hidden_layers=3, kda_layers=(1, 2), vocab_size=256)
    model = small_model(config, torch.float32)
    result = bench_model("tiny", model, "aot_eager", 8, 1, 1, ["contiguous_views"])
    linear = sum(model.config.is_kda(i) for i in range(len(model.layers)))
    assert result.sites == {"contiguous_views": 8 * linear}
    assert [v.name for v in result.variants] == ["all", "-contiguous_views", "none"]
    assert result.pass_seconds["contiguous_views"] > 0


def test_an_unknown_pass_and_empty_counts_are_refused():
    with pytest.raises(ValueError, match="no pass is called latent_tial; passes: "):
        bench("tiny", passes=["latent_tial"])
    with pytest.raises(
        ValueError, match="prompt must be at least 1, got 0; rounds must be at least 1, got 0"
    ):
        bench("tiny", prompt=0, rounds=0)
