"""Pairs are compared without trust, symbols and memory as they correspond."""

from graph_snapshots import graph, node, ref, tensor

from k3compile.graphdiff.compare import Comparison, paired_symbols, roots_of
from k3compile.graphdiff.graph import Graph
from k3compile.graphdiff.match import match


def sized(shape, symbols):
    nodes = [node(0, "placeholder", "x", value=tensor(0, shape, stride=[8, 1]))]
    return Graph(graph([*nodes, node(1, "output", "output", [[ref(0)]])], symbols))


def test_symbols_inside_of_sums_are_paired_too():
    found = match(sized(("2*s0", 8), ["s0"]), sized(("2*s5", 8), ["s5"]))
    assert paired_symbols(found) == {"s0": "s5"}
    assert not Comparison(found).meta(0, 0)


def test_the_same_symbols_in_another_sum_are_a_difference():
    found = match(sized(("2*s0", 8), ["s0"]), sized(("3*s0", 8), ["s0"]))
    assert Comparison(found).meta(0, 0) == ["shape f32[2*s0, 8] -> f32[3*s0, 8]"]


def test_ignored_attributes_are_not_looked_at():
    found = match(sized((4, 8), []), sized((5, 8), []))
    assert Comparison(found).meta(0, 0)
    assert not Comparison(found, frozenset(["shape"])).meta(0, 0)


def test_a_string_that_looks_like_a_symbol_is_a_word():
    def called(word):
        nodes = [node(0, "placeholder", "x", value=tensor(0))]
        nodes.append(node(1, "call_function", "f", [ref(0), word], tensor(1)))
        return Graph(graph([*nodes, node(2, "output", "output", [[ref(1)]])]))

    assert Comparison(match(called("s0"), called("s1"))).rewritten(1, 1) == ["argument 1: 's0' -> 's1'"]


def test_nodes_that_share_memory_without_reading_each_other_are_found():
    nodes = [node(i, "placeholder", f"x{i}", value=tensor(0 if i < 2 else 5)) for i in range(3)]
    assert roots_of(Graph(graph(nodes))) == {0: {1}, 1: {0}}
