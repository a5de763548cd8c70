"""Snapshots are checked before they are trusted, and order is kept only where it matters."""

import pytest
from graph_snapshots import graph, node, ref, tensor

from k3compile.graphdiff.graph import Graph, check, skeleton

X = node(0, "placeholder", "x", value=tensor(0))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "it names no schema; expected 'k3graph/1'"),
        ({"schema": "k3graph/2"}, "its schema is 'k3graph/2'"),
        ({"schema": "k3graph/1", "nodes": 3}, "'nodes' is no list"),
        ({"schema": "k3graph/1", "nodes": [{"id": 0}]}, "node 0 lacks name, op"),
        (graph([X, X]), "two nodes have the same id"),
        (
            graph([{**X, "args": None}]) if False else {"schema": "k3graph/1", "nodes": [X | {"args": 3}]},
            "wrong type",
        ),
    ],
)
def test_what_is_no_snapshot_is_refused_with_what_it_is(data, said):
    with pytest.raises(ValueError, match=said):
        check(data)


@pytest.mark.parametrize(("reads", "said"), [(9, "reads node 9"), (1, "reads a node that comes after it")])
def test_a_node_reads_what_came_before_it(reads, said):
    with pytest.raises(ValueError, match=said):
        Graph(graph([X, node(1, "call_function", "aten.neg.default", [ref(reads)], tensor(1))]))


def test_operands_are_found_wherever_they_stand():
    read = []
    skeleton([[{"node": 3}], {"slice": [{"node": 1}, None, 2]}, "x"], read)
    assert read == [3, 1]


def test_constants_of_other_types_are_other_skeletons():
    assert len({skeleton([v], []) for v in (1, 1.0, True, "1", None)}) == 5


def test_readers_follow_the_write_and_the_write_follows_earlier_readers_but_no_view():
    calls = [
        node(1, "call_function", "aten.clone.default", [ref(0)], tensor(1)),
        node(2, "call_function", "aten.t.default", [ref(0)], tensor(0)),
        node(3, "call_method", "add_", [ref(0), 1], tensor(0)),
        node(4, "call_function", "aten.clone.default", [ref(2)], tensor(4)),
    ]
    order = Graph(graph([X, *calls])).order(range(5))
    assert order[3] == {1}
    assert order[4] == {3}
    assert 2 not in order
