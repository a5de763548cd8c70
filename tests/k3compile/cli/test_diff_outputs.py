"""What `k3 diff` writes for one graph and for several."""

import json
import re
from dataclasses import replace

import pytest
from graph_snapshots import random_graph

from k3compile.cli.diff_inputs import Comparison
from k3compile.cli.diff_outputs import indented, rendered
from k3compile.graphdiff.cost import cost
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


@pytest.mark.parametrize("format", ["mermaid", "dot", "onnx"])
def test_a_drawing_is_of_one_graph(format):
    with pytest.raises(ValueError, match="shows one graph, there are 2: a, b"):
        rendered([one("a"), one("b")], format, {}, None)


def test_a_page_holds_several_graphs():
    page = rendered([one("a", 69), one("b")], "html", {}, None)
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    assert [(g["name"], g["layers"], len(g["stages"])) for g in data["graphs"]] == [("a", 69, 2), ("b", 1, 2)]


def test_a_page_begins_with_the_sizes_and_the_generated_code_that_were_given():
    data = random_graph(1, writes=0)
    size = sorted(cost(data).unknown)[0]
    code = {"after": {"launches": 3}}
    found = replace(one("a"), generated=code)
    page = rendered([found], "html", dict.fromkeys(cost(data).unknown, 5), None)
    content = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    assert content["generated"] == code
    assert content["sizes"][size] == 5


def test_messages_are_indented_line_by_line():
    assert indented("a\nb") == "     a\n     b"
