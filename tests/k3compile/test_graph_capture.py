"""A callable's graphs are captured stage by stage, as often as asked."""

import math

import pytest
import torch

import k3compile
from k3compile.dump import Seen
from k3compile.graph_capture import capture, counted, fresh, last_run
from k3compile.graphdiff.diff import diff


def program(x, w):
    return torch.index_select(x, 0, torch.arange(2, 5)) @ w


ARGS = (torch.ones(8, 4), torch.ones(4, 4))


def test_the_public_name_is_the_function_every_time():
    assert k3compile.capture is capture
    assert k3compile.capture is capture


def test_stages_run_from_the_captured_graph_to_the_lowered_one():
    (found,) = capture(program, *ARGS)
    names = [s.name for s in found.stages]
    assert (names[0], names[-1]) == ("captured", "lower")
    assert "contiguous_views" in names
    assert [r["kind"] for r in found.stage("contiguous_views").remarks] == ["applied"]
    views = names.index("contiguous_views")
    change = diff(found.stages[views - 1].snapshot, found.stages[views].snapshot)
    assert {c.kind for c in change.changes} == {"rewritten"}


def test_the_same_program_is_captured_again_and_traced_anew_is_the_same():
    found = [
        capture(program, *ARGS)[0].stages[-1].snapshot for _ in range(10)
    ]  # Dynamo stops at 8 recompiles
    assert all(diff(found[0], one).same for one in found[1:])


def test_a_disabled_pass_and_a_bad_option_are_heard():
    (found,) = capture(program, *ARGS, options={"disable": ["contiguous_views"]})
    assert "contiguous_views" not in [s.name for s in found.stages]
    with pytest.raises(ValueError, match="did you mean 'disable'"):
        capture(program, *ARGS, options={"disabel": []})


def test_a_program_without_a_graph_is_told():
    with pytest.raises(ValueError, match="'hypot' compiled no graph"):
        capture(math.hypot, 3.0, 4.0)


def test_sizes_of_an_earlier_capture_do_not_make_later_ones_dynamic():
    capture(program, *ARGS)
    (found,) = capture(program, torch.ones(9, 4), torch.ones(4, 5))
    assert found.stages[-1].snapshot["symbols"] == {}


def test_a_fresh_function_leaves_the_users_cache_alone():
    assert fresh(program).__code__ is not fresh(program).__code__


def test_of_a_compile_that_starts_over_the_last_run_counts():
    dynamo, aten = {"level": "dynamo"}, {"level": "aten"}
    runs = [
        Seen("k", name, level, level)
        for name, level in (("a", dynamo), ("b", aten), ("a", dynamo), ("c", aten))
    ]
    assert [s.name for s in last_run(runs)] == ["a", "c"]


@pytest.mark.inductor
def test_the_code_that_inductor_made_is_counted_too():
    (found,) = capture(program, *ARGS, options={"inner": "inductor"})
    assert found.generated["after"]["launches"] >= 1
    assert capture(program, *ARGS)[0].generated == {}


def test_of_several_bodies_the_last_one_counts_and_none_is_none():
    assert counted((), ({"launches": 3}, {"launches": 2})) == {"after": {"launches": 2}}
    assert counted(({"launches": 4},), ({},)) == {"before": {"launches": 4}}
