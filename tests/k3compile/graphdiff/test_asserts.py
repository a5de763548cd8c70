"""Budgets hold graphs to limits, and say why not."""

import json

import pytest
from graph_snapshots import graph, node, ref, tensor

from k3compile.graphdiff.asserts import check, limit, read_budget
from k3compile.graphdiff.diff import diff
from k3compile.graphdiff.timeline import of_passes

NODES = [
    node(0, "placeholder", "x", value=tensor(0, (4, 8))),
    node(1, "call_function", "aten.index_select.default", [ref(0)], tensor(1, (4, 8))),
    node(2, "call_function", "aten.neg.default", [ref(1)], tensor(2, (4, 8))),
    node(3, "output", "output", [[ref(2)]]),
]
REMARKS = [
    {"pass_name": "contiguous_views", "kind": "applied", "node": "a", "op": "gather", "reason": ""},
    {"pass_name": "contiguous_views", "kind": "missed", "node": "b", "op": "gather", "reason": "no range"},
]  # fmt: skip
AFTER = graph(NODES) | {"remarks": REMARKS}
TIMELINE = of_passes("g", [("contiguous_views", graph(NODES), AFTER)])


def results(tmp_path, text, found=None, name="budget.toml"):
    path = tmp_path / name
    path.write_text(text)
    return {r.name: r for r in check(read_budget(path), TIMELINE, found)}


def test_limits_are_read_from_toml_and_from_json(tmp_path):
    toml = 'nodes = "<= 4"\nops.aten.index_select.default = 0\napplied.contiguous_views = ">= 1"\n'
    found = results(tmp_path, toml)
    assert {name: r.ok for name, r in found.items()} == {
        "nodes <= 4": True,
        "ops.aten.index_select.default = 0": False,
        "applied.contiguous_views >= 1": True,
    }
    data = {
        "limits": ["ops.aten >= 2", "launches < 1", "inputs = 1", "changes = 0"],
        "ops": {"aten.neg": "== 1"},
    }
    found = results(tmp_path, json.dumps(data), diff(graph(NODES), AFTER), "b.json")
    assert [n for n, r in found.items() if not r.ok] == ["launches < 1"]


def test_a_pass_that_did_too_little_says_why(tmp_path):
    (one,) = results(tmp_path, 'applied.contiguous_views = ">= 8"').values()
    assert one.message == ("applied.contiguous_views is 1, allowed: >= 8\ngather at b: no range")
    (one,) = results(tmp_path, 'applied.contiguous_vews = ">= 8"').values()
    assert one.message.endswith("no pass 'contiguous_vews' ran (did you mean 'contiguous_views'?)")


def test_costs_with_symbols_need_sizes(tmp_path):
    symbolic = of_passes("g", [("p", sized(), sized())])
    path = tmp_path / "b.toml"
    path.write_text('bytes_read = "<= 1"')
    (one,) = check(read_budget(path), symbolic)
    assert not one.ok
    assert "give the sizes" in one.message
    path.write_text('bytes_read = "<= 1000"\nat = {s0 = 4}')
    (one,) = check(read_budget(path), symbolic)
    assert one.ok, one.message


def sized():
    nodes = [
        node(0, "placeholder", "x", value=tensor(0)),
        node(1, "call_function", "aten.neg.default", [ref(0)], tensor(1)),
    ]
    return graph([*nodes, node(2, "output", "output", [[ref(1)]])])


def test_changes_need_two_graphs(tmp_path):
    (one,) = results(tmp_path, "changes = 0").values()
    assert (one.ok, one.message) == (False, "changes needs two graphs")


def test_a_golden_that_differs_prints_the_diff(tmp_path):
    other = [dict(n) for n in NODES]
    other[2]["target"] = "aten.abs.default"
    (tmp_path / "golden.json").write_text(json.dumps(graph(other)))
    (one,) = results(tmp_path, 'same_as = "golden.json"').values()
    assert not one.ok
    assert "target aten.abs.default -> aten.neg.default" in one.message
    (tmp_path / "golden.json").write_text(json.dumps(graph(NODES)))
    assert all(r.ok for r in results(tmp_path, 'same_as = "golden.json"').values())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nodes", "'nodes' is no limit; expected for instance 'nodes <= 40'"),
        ("nodes <= many", "is no limit"),
        ("node <= 4", r"no quantity 'node' \(did you mean 'nodes'\?\)"),
        ("aplied.contiguous_views >= 1", r"did you mean 'applied'"),
        ("ops >= 1", "no quantity 'ops'"),
    ],
)
def test_what_is_no_limit_gets_one_line(line, said):
    with pytest.raises(ValueError, match=said) as error:
        limit(line)
    assert "\n" not in str(error.value)


def test_all_mistakes_of_a_budget_are_told_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"budget.toml: .*lunches.*; .*at is"):
        results(tmp_path, 'lunches = 3\nat = {s0 = "x"}')
    with pytest.raises(ValueError, match="is no TOML budget"):
        results(tmp_path, "nodes <= 3")
