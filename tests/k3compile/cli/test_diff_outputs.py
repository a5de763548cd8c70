"""What `k3 diff` writes for one graph and for several."""

import json

import pytest
from graph_snapshots import random_graph

from k3compile.cli.diff_inputs import Comparison
from k3compile.cli.diff_outputs import indented, rendered
from k3compile.graphdiff.diff import diff
from k3compile.graphdiff.timeline import Stage, Timeline


def one(name, times=1):
    data = random_graph(1, writes=0)
    return Comparison(name, times, diff(data, data), Timeline(name, (Stage("captured", data),)), False)


def test_several_graphs_are_named():
    assert (
        rendered([one("a", 3), one("b")], "text", {}, None)
        == "a x3: the same: 35 nodes\nb: the same: 35 nodes\n"
    )
    assert json.loads(rendered([one("a"), one("b")], "json", {}, None))["schema"] == "k3diffs/1"


@pytest.mark.parametrize("format", ["mermaid", "dot", "html", "onnx"])
def test_a_drawing_is_of_one_graph(format):
    with pytest.raises(ValueError, match="shows one graph, there are 2: a, b"):
        rendered([one("a"), one("b")], format, {}, None)


def test_messages_are_indented_line_by_line():
    assert indented("a\nb") == "     a\n     b"
