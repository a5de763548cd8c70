"""Equal names are equal subgraphs."""

from graph_snapshots import graph, node, random_graph, ref, rewritten_down, tensor

from k3compile.graphdiff.graph import Graph
from k3compile.graphdiff.labels import Labels, alias, downward, refined, upward


def slots(one):
    return {i: number for number, i in enumerate(one.inputs)}


def test_a_graph_written_down_differently_has_the_same_names():
    data = random_graph(3, 60)
    graphs = Graph(data), Graph(rewritten_down(data, 8))
    table = {}
    labels = [Labels(g, slots(g), table).strict for g in graphs]
    for hashed in (upward, downward):
        one, other = (sorted(hashed(g, names, table)) for g, names in zip(graphs, labels))
        assert one == other


def test_refinement_tells_apart_what_neither_side_does_alone():
    nodes = [node(0, "placeholder", "x", value=tensor(0))]
    nodes += [node(i, "call_function", "aten.sin.default", [ref(0)], tensor(i)) for i in (1, 2)]
    nodes += [node(3, "call_function", "aten.neg.default", [ref(1)], tensor(3))]
    nodes += [node(4, "call_function", "aten.neg.default", [ref(2)], tensor(4))]
    nodes.append(node(5, "output", "output", [[ref(3), ref(1), ref(2), ref(4)]]))
    one = Graph(graph(nodes))
    (names,) = refined([one], [[0] * 6])
    assert len(set(names)) == 6


def test_alias_is_the_operand_whose_memory_is_shown():
    nodes = [node(i, "placeholder", f"x{i}", value=tensor(i)) for i in (0, 1)]
    nodes.append(node(2, "call_function", "f", [ref(0), ref(1)], tensor(1)))
    nodes.append(node(3, "call_function", "f", [ref(0), ref(1)], tensor(3)))
    one = Graph(graph(nodes))
    assert [alias(one, i) for i in range(4)] == [None, None, 1, None]
