"""What is left unmatched is put together by what reads it."""

from graph_snapshots import graph, node, ref, tensor

from k3compile.graphdiff.graph import Graph
from k3compile.graphdiff.islands import islands
from k3compile.graphdiff.match import match


def chain(*targets):
    nodes = [node(0, "placeholder", "x", value=tensor(0))]
    for target in targets:
        i = len(nodes)
        nodes.append(node(i, "call_function", target, [ref(i - 1)], tensor(i)))
    return Graph(graph([*nodes, node(len(nodes), "output", "output", [[ref(len(nodes) - 1)]])]))


def test_a_replaced_bit_is_one_island():
    found = match(chain("a", "b", "c", "d"), chain("a", "e", "d"))
    assert islands(found) == [([2, 3], [2])]


def test_two_bits_are_two_islands():
    found = match(chain("a", "b", "c", "d", "e"), chain("x", "y", "c", "p", "q", "e"))
    assert islands(found) == [([1, 2], [1, 2]), ([4], [4, 5])]


def test_the_part_that_fits_into_the_other_side_is_matched():
    found = match(chain("a", "f", "g", "z"), chain("a", "p", "f", "g", "q", "z"))
    assert found.forward[2:4] == [3, 4]
    assert islands(found) == [([], [2]), ([], [5])]
