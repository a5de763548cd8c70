"""A snapshot becomes a valid ONNX model with the same wiring and sizes, and says what a diff changed."""

import sys

import onnx
import pytest
from made_graphs import Maker, delta, layered, tensor

from k3compile.graphdiff.onnx_graph import attribute, diff_to_onnx, domain_and_kind, to_onnx


def props(holder) -> dict[str, str]:
    return {p.key: p.value for p in holder.metadata_props}


def test_nodes_keep_their_wiring_sizes_and_sources():
    graph = layered(2)
    model = to_onnx(graph)
    onnx.checker.check_model(model)
    by_name = {n.name: n for n in model.graph.node}
    first = by_name["index_select_0_0"]
    assert (first.domain, first.op_type, list(first.input)) == ("pkg.aten", "index_select", ["x", "rows"])
    assert props(first)["k3.source"] == "runtime/attention.py:52"
    assert props(first)["k3.stride"] == "[64, 1]"
    assert [i.name for i in model.graph.input] == ["x", "rows"]
    dims = model.graph.input[0].type.tensor_type.shape.dim
    assert (dims[0].dim_param, dims[1].dim_value) == ("s0", 64)
    assert model.graph.input[1].type.tensor_type.elem_type == onnx.TensorProto.INT64
    wires = {(i, n.name) for n in model.graph.node for i in n.input}
    names = {n["id"]: n["name"] for n in graph["nodes"]}
    assert wires == {(names[a], names[b]) for a, b in graph["edges"]} | {("add_1", "output")}
    assert props(model)["k3.schema"] == "k3graph/1"


def test_what_is_not_a_node_becomes_an_attribute():
    make = Maker()
    x = make.add("x", "x", value=tensor(0, 4), op="placeholder")
    make.add("y", "k3.rms_norm.default", x, value=tensor(1, 4))
    make.nodes[1]["args"] = [
        {"node": x}, 1e-5, [2, 3], None, {"torch": "float32"}, {"sym": "s0 + 1"}, [{"node": x}, 7], True,
        2**70,
    ]  # fmt: skip
    make.nodes[1]["kwargs"] = {"dim": -1}
    make.add("output", "output", [{"node": x}, {"node": 1}, {"node": 1}], op="output")
    model = to_onnx(make.graph())
    onnx.checker.check_model(model)
    node = model.graph.node[0]
    found = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert found["arg1"] == pytest.approx(1e-5)
    del found["arg1"]
    assert found == {
        "arg2": [2, 3], "arg3": b"None", "arg4": b"float32", "arg5": b"s0 + 1", "arg6": b"[%x, 7]", "arg7": 1,
        "arg8": str(2**70).encode(), "dim": -1,
    }  # fmt: skip
    assert list(node.input) == ["x", "x"]
    assert len(model.graph.output) == 3


def test_a_diff_is_one_model_with_marks_and_dead_ends():
    before, after = layered(2), layered(2, views=True)
    found = {"schema": "k3diff/1", "before": before, "after": after, "costs": None, **delta(before, after)}
    model = diff_to_onnx(found)
    onnx.checker.check_model(model)
    marks = {n.name: props(n).get("k3.diff") for n in model.graph.node}
    assert marks["slice_0_0"] == "rewritten"
    assert marks["mm_0_3"] is None
    assert {n for n, mark in marks.items() if mark == "removed"} == {
        "removed/index_copy_0", "removed/index_copy_1"
    }  # fmt: skip
    gone = next(n for n in model.graph.node if n.name == "removed/index_copy_1")
    assert list(gone.input) == ["mm_1_19", "rows"]
    rewritten = next(n for n in model.graph.node if n.name == "slice_0_0")
    assert "index_select" in props(rewritten)["k3.diff.detail"]


def test_names_that_come_twice_are_told_apart():
    graph = layered(1)
    for node in graph["nodes"]:
        node["name"] = "same"
    model = to_onnx(graph)
    onnx.checker.check_model(model)
    names = [n.output[0] for n in model.graph.node]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("target", "want"),
    [
        ("aten.mm.default", ("pkg.aten", "mm")),
        ("aten.slice.Tensor", ("pkg.aten", "slice.Tensor")),
        ("k3.kda_prefill_into.default", ("pkg.k3", "kda_prefill_into")),
        ("operator.getitem", ("pkg.operator", "getitem")),
        ("relu_", ("pkg.fx", "relu_")),
    ],
)
def test_an_op_keeps_its_namespace_as_domain(target, want):
    assert domain_and_kind(target) == want


def test_an_infinite_number_is_spelled():
    assert attribute({"float": "inf"}, {}) == "inf"


def test_without_the_package_there_is_one_line_to_follow(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ValueError, match=r"pip install 'k3compile\[onnx\]'"):
        to_onnx(layered(1))
