"""Snapshots are checked before they are trusted, and order is kept only where it matters."""

import pytest
from graph_snapshots import graph, node, ref, tensor

from k3compile.graphdiff.diff import diff
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
        ({"schema": "k3graph/1", "nodes": []}, "it lacks level, symbols, edges; write it again"),
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


def reduces(first, second):
    """Two collectives of their own, in the order of the arguments, and a wait for both."""
    y = node(1, "placeholder", "y", value=tensor(1))
    calls = {
        2: node(2, "call_function", "_c10d_functional.all_reduce.default", [ref(0), "sum", "0"], tensor(2)),
        3: node(3, "call_function", "k3.latent_tail.default", [ref(1), 1e-6, "0"], tensor(3)),
    }
    waits = [
        node(4, "call_function", "_c10d_functional.wait_tensor.default", [ref(2)], tensor(4)),
        node(5, "output", "output", [[ref(4), ref(3)]]),
    ]
    return graph([X, y, calls[first], calls[second], *waits])


def test_collectives_that_change_places_have_moved_since_ranks_would_wait_for_each_other():
    found = diff(reduces(2, 3), reduces(3, 2))
    assert {c.kind for c in found.changes} == {"moved"}
    assert "followed nothing, now follows %n3" in [c.detail for c in found.changes]
    assert diff(reduces(2, 3), reduces(2, 3)).same


def test_a_tail_without_a_group_talks_to_no_rank():
    assert Graph(reduces(2, 3)).order(range(6)) == {2: frozenset(), 3: {2}}
    alone = reduces(2, 3)
    alone["nodes"][3]["args"][-1] = ""
    assert Graph(alone).order(range(6)) == {2: frozenset()}
