"""Drawings show what changed and what touches it, whatever the names hold."""

import pytest
from graph_snapshots import graph, node, random_graph, ref, tensor

from k3compile.graphdiff.diff import diff
from k3compile.graphdiff.render_graph import dot, drawing, mermaid

HOSTILE = 'f"]; click x href "javascript:1"\n<b>'


def chain(*targets):
    nodes = [node(0, "placeholder", "x", value=tensor(0))]
    for target in targets:
        nodes.append(node(len(nodes), "call_function", target, [ref(len(nodes) - 1)], tensor(len(nodes))))
    return graph([*nodes, node(len(nodes), "output", "output", [[ref(len(nodes) - 1)]])])


def test_only_what_changed_and_its_neighbours_are_drawn():
    boxes, edges = drawing(diff(chain(*"abcdefg"), chain(*"abcXYefg")))
    assert {b.label.split()[1] for b in boxes} == {"c", "d", "X", "Y", "e"}
    assert {b.kind for b in boxes} == {"same", "removed", "rewritten"}
    assert sorted(gone for _, _, gone in edges) == [False, False, False, True, True]


def test_hostile_names_stay_inside_their_quotes():
    found = diff(chain("a"), chain("a", HOSTILE))
    assert '"javascript' not in mermaid(found)
    assert "<b>" not in mermaid(found)
    assert all(row.count('"') in (0, 2) for row in mermaid(found).splitlines())
    assert '\\"javascript:1\\" <b>' in dot(found)


def test_a_drawing_of_thousands_is_refused_with_what_to_do():
    data = random_graph(1, 500)
    with pytest.raises(ValueError, match="400 are readable: use --format html"):
        mermaid(diff(data, data))
