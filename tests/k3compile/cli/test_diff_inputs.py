"""What `k3 diff` takes: a checkpoint is compiled, one graph a kind of layer."""

import copy
import json
from pathlib import Path

import pytest
from graph_snapshots import random_graph

from k3compile.cli.diff_inputs import comparisons, paired
from k3compile.cli.diff_outputs import rendered


def test_graphs_of_two_dumps_are_paired_by_name_or_else_in_order():
    one, two = ("a", 1, None), ("b", 1, None)
    assert paired([one, two], [two, one], Path("x"), Path("y")) == [(one, one), (two, two)]
    assert paired([one], [two], Path("x"), Path("y")) == [(one, two)]
    with pytest.raises(ValueError, match="x has 1 graphs and y has 2"):
        paired([one], [one, two], Path("x"), Path("y"))


def test_stages_that_are_named_cut_the_timeline_and_keep_it_stage_by_stage(tmp_path):
    data = random_graph(3)
    stages = [
        {"name": n, "snapshot": d} for n, d in (("captured", data), ("p", random_graph(4)), ("q", data))
    ]
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"schema": "k3timeline/1", "graph": "g", "stages": stages}))
    assert comparisons(path, None, "aten", "final", [], [])[0].stepwise
    (one,) = comparisons(path, None, "captured", "q", [], [])
    assert (one.stepwise, one.diff.same) == (True, True)
    (one,) = comparisons(path, None, "p", "q", [], [])
    assert [s.name for s in one.timeline.stages] == ["p", "q"]
    assert not one.diff.same
    with pytest.raises(ValueError, match="--before q comes after --after p: swap them"):
        comparisons(path, None, "q", "p", [], [])


def test_what_to_ignore_holds_for_every_stage(tmp_path):
    data = random_graph(3)
    other = copy.deepcopy(data)
    for one in other["nodes"]:
        if "device" in (one["value"] or ()):
            one["value"]["device"] = "cuda"
    stages = [{"name": n, "snapshot": d} for n, d in (("captured", data), ("p", other))]
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"schema": "k3timeline/1", "graph": "g", "stages": stages}))
    (one,) = comparisons(path, None, "aten", "final", ["device"], [])
    assert one.stepwise
    assert rendered([one], "text", {}, None) == "g: 35 nodes captured\n  p: the same: 35 nodes\n"
    (one,) = comparisons(path, None, "aten", "final", [], [])
    assert "meta" in rendered([one], "text", {}, None)


def test_inductor_is_for_checkpoints(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(random_graph(3)))
    with pytest.raises(ValueError, match="--inner compiles a checkpoint's layers"):
        comparisons(tmp_path / "a.json", None, "aten", "final", [], [], "inductor")


def test_two_snapshots_are_one_comparison(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(json.dumps(random_graph(3)))
    (one,) = comparisons(tmp_path / "a.json", tmp_path / "b.json", "aten", "final", [], [])
    assert one.diff.same
    assert not one.stepwise


def test_a_mistyped_pass_gets_the_nearest(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"--disable names no pass: 'latent_tial' \(did you mean 'latent_tail'\?\)"
    ):
        comparisons(tmp_path, None, "aten", "final", [], ["latent_tial"])


@pytest.mark.slow
def test_a_checkpoint_shows_each_kind_of_layer_and_a_pass_that_is_off(tmp_path):
    from k3compile.runtime.presets import PRESETS, config_json

    config = tmp_path / "config.json"
    config.write_text(json.dumps(config_json(PRESETS["tiny"])))
    found = comparisons(config, None, "aten", "final", [], [])
    assert sum(one.times for one in found) == 9
    assert len(found) == 4
    kda = next(one for one in found if one.name == "kda+moe")
    assert (
        sum(r["kind"] == "applied" and r["pass_name"] == "contiguous_views" for r in kda.timeline.remarks)
        == 8
    )
    off = comparisons(config, None, "aten", "final", [], ["contiguous_views"])
    assert {one.name: one.diff.same for one in off}["mla+moe"]
    assert not {one.name: one.diff.same for one in off}["kda+moe"]
