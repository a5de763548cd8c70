"""The text is the same everywhere; a terminal gets a tree and a table."""

import io

from graph_snapshots import graph, node, ref, tensor
from rich.console import Console

from k3compile.graphdiff.diff import diff
from k3compile.graphdiff.render_text import op_counts, show, text, timeline_text
from k3compile.graphdiff.timeline import of_passes


def one(target, extra=0):
    nodes = [
        node(0, "placeholder", "x", value=tensor(0)),
        node(1, "call_function", target, [ref(0)], tensor(1)),
    ]
    nodes += [node(2 + i, "call_function", "aten.neg", [ref(1 + i)], tensor(2 + i)) for i in range(extra)]
    return graph([*nodes, node(2 + extra, "output", "output", [[ref(1 + extra)]])])


def test_equal_graphs_are_one_line():
    assert text(diff(one("a"), one("a"))) == "the same: 3 nodes\n"


def test_a_change_is_told_with_its_detail():
    found = diff(one("a"), one("b"))
    assert text(found) == "3 nodes -> 3 nodes: 1 rewritten\n  rewritten: %n1: target a -> b\n"
    assert op_counts(found) == {"a": (1, 0), "b": (0, 1)}


def test_many_lines_of_one_bit_are_cut():
    rows = text(diff(one("a"), one("b", extra=30))).splitlines()
    assert len(rows) < 50


def test_a_timeline_says_what_each_pass_did_and_how_often_it_applied():
    after = one("b") | {"remarks": [{"kind": "applied", "pass_name": "p"}] * 2}
    said = timeline_text(of_passes("g", [("p", one("a"), after), ("q", after, after)]), 69)
    assert said == (
        "g x69: 3 nodes captured\n"
        "  p: 3 nodes -> 3 nodes: 1 rewritten; 2 applied\n"
        "    rewritten: %n1: target a -> b\n"
        "  q: the same: 3 nodes; 2 applied\n"
    )


def test_a_terminal_gets_colours_and_a_pipe_gets_none():
    for terminal in (True, False):
        stream = io.StringIO()
        show(Console(file=stream, force_terminal=terminal, width=80), diff(one("a[red]"), one("b")), "layer")
        assert ("\x1b[" in stream.getvalue()) == terminal
        assert "a[red] -> b" in stream.getvalue()
