"""One change tells what many readers would repeat."""

from graph_snapshots import graph, node, ref, tensor

from k3compile.graphdiff.diff import diff
from k3compile.graphdiff.graph import Graph
from k3compile.graphdiff.match import match
from k3compile.graphdiff.replaced import Replaced


def fan(through):
    nodes = [node(0, "placeholder", "x", value=tensor(0))]
    if through:
        nodes.append(node(1, "call_function", "aten.neg.default", [ref(0)], tensor(1)))
    read = len(nodes) - 1
    nodes += [node(i, "call_function", f"aten.op{i}", [ref(read)], tensor(i)) for i in range(2, 7)]
    return graph([*nodes, node(7, "output", "output", [[ref(i) for i in range(2, 7)]])])


def test_a_node_put_before_five_readers_is_one_change():
    (change,) = diff(fan(False), fan(True)).changes
    assert (change.kind, change.detail) == ("added", "aten.neg.default f32[s0, 8], read in the place of %n0")


def test_a_node_taken_away_says_what_is_read_now():
    (change,) = diff(fan(True), fan(False)).changes
    assert (change.kind, change.detail) == (
        "removed",
        "aten.neg.default f32[s0, 8], its readers now read %n0",
    )


def test_readers_that_disagree_are_told_each():
    after = fan(True)
    after["nodes"][2]["args"] = [ref(0)]
    found = match(Graph(fan(True)), Graph(after))
    assert not Replaced(found).told(1, 0)
    assert len(diff(fan(True), after).changes) == 1
