"""`--at`: names, symbols and K3's short names; what is wrong or missing is told in one line."""

import pytest

from k3compile.cli.sizes import check_sizes, known_sizes, sizes_of
from k3compile.graphdiff.cost import cost


def graph(name, *sizes):
    value = {"dtype": "float32", "shape": list(sizes), "stride": [], "device": "cpu", "storage": 0}
    x = {"id": 0, "name": "arg0_1", "input": name, "op": "placeholder", "target": "x", "value": value}
    y = {
        "id": 1,
        "name": "y",
        "op": "call_function",
        "target": "aten.exp.default",
        "value": value | {"storage": 1},
    }
    nodes = [x | {"args": [], "kwargs": {}}, y | {"args": [{"node": 0}], "kwargs": {}}]
    return cost({"schema": "k3graph/1", "level": "aten", "symbols": {}, "nodes": nodes, "edges": [[0, 1]]})


def test_sizes_are_pairs_of_a_name_and_a_number():
    assert sizes_of("p.0=64, step.spans[0]=3") == {"p.0": 64, "step.spans[0]": 3}
    assert sizes_of(None) == {}
    with pytest.raises(ValueError, match=r"--at has T, x=-1; expected sizes such as p.0=64"):
        sizes_of("T,x=-1")


def test_a_size_is_found_by_meaning_symbol_and_short_name():
    one = graph("p", "u1", 8)
    assert (
        known_sizes(one, {"p.0": 64})
        == known_sizes(one, {"u1": 64})
        == known_sizes(one, {"T": 64})
        == {"u1": 64}
    )
    assert one.at(known_sizes(one, {"T": 64}))["launches"] == 1


def test_a_size_of_another_graph_is_left_out_and_one_of_none_is_refused():
    costs = [graph("p", "u0"), graph("pages", "u0")]
    assert known_sizes(costs[0], {"T": 4, "pages.0": 2}) == {"u0": 4}
    check_sizes(costs, {"T": 4, "pages.0": 2})
    with pytest.raises(
        ValueError, match=r"no size is called page.0 \(did you mean 'pages.0'\?\); sizes: p.0, pages.0, T"
    ):
        check_sizes(costs, {"page.0": 2})


def test_all_missing_sizes_are_asked_for_at_once():
    with pytest.raises(ValueError, match=r"--at lacks q.0=...,q.1=..."):
        check_sizes([graph("p", "u0"), graph("q", "u0", "u1")], {"T": 4})
