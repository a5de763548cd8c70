"""A graph is the same as itself however it is written down, and twins are matched by what is around them."""

import time

import pytest
from graph_snapshots import graph, node, random_graph, ref, rewritten_down, tensor
from hypothesis import given, settings
from hypothesis import strategies as st

from k3compile.graphdiff.diff import diff
from k3compile.graphdiff.graph import Graph
from k3compile.graphdiff.match import match


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.integers(0, 10**6), st.integers(3, 70), st.integers(0, 10**6))
def test_other_names_order_ids_symbols_and_storages_are_no_difference(seed, size, how):
    data = random_graph(seed, size)
    found = diff(data, rewritten_down(data, how))
    assert found.same, found.changes
    assert len(found.pairs) == len(data["nodes"])


def test_repeated_layers_around_an_edit_keep_their_partners():
    data = layers(12)
    other = layers(12, edited=5)
    found = match(Graph(data), Graph(other))
    wrong = [(b, a) for b, a in enumerate(found.forward) if a is not None and b != a]
    assert not wrong
    assert len(diff(data, other).changes) == 1


def test_equal_branches_are_told_apart_by_where_they_go():
    def twin(swap):
        nodes = [node(0, "placeholder", "x", value=tensor(0))]
        nodes += [node(i, "call_function", "aten.sin.default", [ref(0)], tensor(i)) for i in (1, 2)]
        ends = [2, 1] if swap else [1, 2]
        nodes.append(node(3, "output", "output", [[ref(e) for e in ends]]))
        return graph(nodes)

    assert diff(twin(False), twin(True)).same


def test_an_input_that_a_pass_added_stays_without_a_partner():
    before = layers(3)
    after = layers(3)
    shifted = [dict(n, id=n["id"]) for n in after["nodes"]]
    shifted.insert(4, node(999, "placeholder", "export", value=tensor(77, (4, 4), "int32")))
    (change,) = diff(before, graph(shifted)).changes
    assert (change.kind, change.before, change.after) == ("added", None, 999)


def test_what_a_pass_kept_is_matched_by_its_word():
    before = layers(1) | {"moment": "a"}
    after = layers(1) | {"moment": "b", "previous": "a"}
    swapped = {3: 2, 2: 3}
    for one in after["nodes"]:
        one["was"] = swapped.get(one["id"], one["id"])
    found = match(Graph(before), Graph(after | {"previous": "other"}))
    assert found.forward[2] == 2
    assert match(Graph(before), Graph(after)).forward[2] == 3


@pytest.mark.slow
def test_fifty_thousand_nodes_take_less_than_thirty_seconds():
    data = random_graph(1, 50_000, inputs=200)
    other = rewritten_words(data)
    started = time.process_time()
    assert diff(data, data).same
    middle = time.process_time()
    found = diff(data, other)
    assert not found.same
    assert len(found.changes) <= 3
    assert middle - started < 30
    assert time.process_time() - middle < 30


def rewritten_words(data):
    """One op in the middle replaced."""
    nodes = [dict(n) for n in data["nodes"]]
    middle = next(n for n in nodes[25_000:] if n["target"] == "aten.mul.Tensor")
    middle["target"] = "aten.div.Tensor"
    return data | {"nodes": nodes}


def layers(count, edited=None):
    """x -> [mm(x, w), relu, add(x)] repeated, a weight for each; one relu made a gelu."""
    nodes = [node(0, "placeholder", "x", value=tensor(0))]
    nodes += [node(i + 1, "placeholder", f"w{i}", value=tensor(i + 1, (8, 8))) for i in range(count)]
    x = 0
    for i in range(count):
        start = len(nodes)
        act = "aten.gelu.default" if i == edited else "aten.relu.default"
        nodes.append(node(start, "call_function", "aten.mm.default", [ref(x), ref(i + 1)], tensor(start)))
        nodes.append(node(start + 1, "call_function", act, [ref(start)], tensor(start + 1)))
        nodes.append(
            node(start + 2, "call_function", "aten.add.Tensor", [ref(start + 1), ref(x)], tensor(start + 2))
        )
        x = start + 2
    nodes.append(node(len(nodes), "output", "output", [[ref(x)]]))
    return graph(nodes)
