"""`k3 export` writes a page, a model or data; each mistake is answered with what to write instead."""

from __future__ import annotations

import json

import onnx
import pytest
from k3compile.runtime.checkpoint import make_checkpoint
from k3compile.runtime.weights import load_model
from made_graphs import delta, layered, timeline
from onnx_layers import case, close, eager_layer, run_onnx
from torch import randn

from k3compile.cli.main import main
from k3compile.dump import dumper


@pytest.fixture
def graphs(tmp_path):
    """A graph, a diff, a timeline as files, and a dump."""
    before, after = layered(2), layered(2, views=True)
    found = {"schema": "k3diff/1", "before": before, "after": after, "costs": None, **delta(before, after)}
    for name, data in (("graph", before), ("diff", found), ("timeline", timeline(2, costs=False))):
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    dumper(tmp_path / "dump", "g1")("contiguous_views", before, after, 0.1)
    return tmp_path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint(folder)
    return folder


def run(capsys, *arguments) -> tuple[int, str]:
    with pytest.raises(SystemExit) as left:
        main(["export", *map(str, arguments)])
    said = capsys.readouterr()
    return left.value.code or 0, said.out + said.err


@pytest.mark.parametrize("name", ["graph.json", "diff.json", "timeline.json", "dump", "dump/g1"])
def test_everything_becomes_a_page_with_its_costs(graphs, capsys, name):
    file = graphs / "out.html"
    code, said = run(capsys, graphs / name, "-o", file)
    assert code == 0, said
    assert f"{file}: {file.stat().st_size:,} bytes of html" in said
    page = file.read_text()
    assert "index_select_0_0" in page
    assert '"launches"' in page


@pytest.mark.parametrize("name", ["graph.json", "diff.json", "timeline.json", "dump"])
def test_everything_becomes_a_model_to_look_at(graphs, capsys, name):
    file = graphs / "out.onnx"
    assert run(capsys, graphs / name, "--to", "onnx", "-o", file)[0] == 0
    model = onnx.load(file)
    onnx.checker.check_model(model)
    marks = {p.value for n in model.graph.node for p in n.metadata_props if p.key == "k3.diff"}
    assert bool(marks) == (name == "diff.json")


def test_one_pass_of_a_dump_is_marked(graphs, capsys):
    file = graphs / "out.onnx"
    assert run(capsys, graphs / "dump", "--stage", "contiguous_views", "-o", file)[0] == 0
    model = onnx.load(file)
    assert {p.value for n in model.graph.node for p in n.metadata_props if p.key == "k3.diff"}
    assert run(capsys, graphs / "dump", "--stage", "captured", "-o", file)[0] == 0


@pytest.mark.parametrize(("kind", "head"), [("mmd", "flowchart"), ("dot", "digraph")])
def test_a_pass_is_drawn(graphs, capsys, kind, head):
    file = graphs / f"out.{kind}"
    code, said = run(capsys, graphs / "dump", "--stage", "contiguous_views", "-o", file)
    assert code == 0, said
    drawn = file.read_text()
    assert head in drawn
    assert "slice_0_0" in drawn
    assert run(capsys, graphs / "graph.json", "-o", file)[0] == 0
    assert "index_copy_1" in file.read_text()


def test_a_dump_becomes_one_file_of_data(graphs, capsys, monkeypatch):
    monkeypatch.chdir(graphs)
    assert run(capsys, "dump/g1", "--to", "json")[0] == 0
    assert json.loads((graphs / "g1.json").read_text())["schema"] == "k3timeline/1"


@pytest.mark.oracle
def test_a_layer_of_a_checkpoint_computes_what_ours_does(tiny, tmp_path, capsys):
    file = tmp_path / "layer.onnx"
    code, said = run(capsys, tiny, "--semantic", "--layer", "1", "--checkpoint", "-o", file)
    assert code == 0, said
    model = load_model(tiny)
    made, width = case(model, 1, 6, 2), model.config.hidden_size
    p, blocks = randn(1, 6, width), randn(1, 1, 6, width)
    at = onnx.numpy_helper.to_array(onnx.helper.make_tensor("at", onnx.TensorProto.INT64, [1], [4]))
    feeds = made.feeds | {"p": p.numpy(), "blocks": blocks.numpy(), "checkpoint_at": at}
    got = run_onnx(onnx.load(file), feeds)
    close(got["p_out"], eager_layer(model, made, 1, p, blocks))


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        (("graph.json",), "say what to write: --to html or onnx or json or mermaid or dot"),
        (
            ("graph.json", "--to", "htm"),
            "cannot write 'htm' (did you mean 'html'?): formats are html, onnx, json, mermaid, dot",
        ),
        (("graph.json", "-o", "x.pdf"), "cannot write 'pdf': formats are"),
        (
            ("graph.json", "--to", "json"),
            "graph.json would be written over itself: give another file with -o",
        ),
        (("none.json", "--to", "html"), "none.json: no such file or folder"),
        (("graph.json", "--to", "onnx", "--stage", "x"), "--stage chooses a pass of a dump"),
        (("dump", "--to", "onnx", "--stage", "contigous_views"), "did you mean 'contiguous_views'?"),
        (("dump", "--to", "html", "--stage", "x"), "--stage goes with --to onnx, mermaid or dot"),
        (("graph.json", "--to", "onnx", "--layer", "1"), "--layer and --checkpoint go with --semantic"),
        (("graph.json", "--semantic"), "is a file: give the folder of a checkpoint"),
        (("graph.json", "--semantic", "--to", "html"), "--semantic writes ONNX: give --to onnx"),
        (("graph.json", "--semantic", "--stage", "x"), "does not go with --semantic"),
        (("graph.json", "--to", "html", "-o", "none/x.html"), "none/x.html: No such file"),
    ],
)
def test_a_mistake_gets_one_line(graphs, capsys, monkeypatch, arguments, want):
    monkeypatch.chdir(graphs)
    code, said = run(capsys, *arguments)
    assert code == 2
    assert want in said
    assert said.count("\n") == 1


def test_a_checkpoint_without_semantic_is_told_both_ways(tiny, capsys):
    code, said = run(capsys, tiny, "--to", "html")
    assert code == 2
    assert "is a checkpoint: add --semantic for its layers, or dump its graphs with `K3_DUMP=dump" in said


def test_a_layer_that_is_not_there_is_refused(tiny, capsys):
    code, said = run(capsys, tiny, "--semantic", "--layer", "9")
    assert code == 2
    assert "layer 9 does not exist: layers are 0 .. 8" in said
