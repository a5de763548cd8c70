"""`k3 diff`: exit code 0 same, 1 differs, 2 misuse with one line."""

import json
import os
import subprocess
import sys

import pytest
from graph_snapshots import graph, node, random_graph, ref, rewritten_down, tensor

from k3compile.cli.main import main


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(["diff", *map(str, arguments)])
    out, err = capsys.readouterr()
    return stop.value.code or 0, out, err


def chain(*targets):
    nodes = [node(0, "placeholder", "x", value=tensor(0, (4, 8)))]
    for target in targets:
        i = len(nodes)
        nodes.append(node(i, "call_function", target, [ref(i - 1)], tensor(i, (4, 8))))
    return graph([*nodes, node(len(nodes), "output", "output", [[ref(len(nodes) - 1)]])])


@pytest.fixture
def files(tmp_path):
    """old.json, new.json, and a dump of one pass between them."""
    old, new = chain("aten.sin.default", "aten.neg.default"), chain("aten.cos.default", "aten.neg.default")
    new |= {"remarks": [{"pass_name": "swap", "kind": "applied", "node": "n1", "op": "sin", "reason": ""}]}
    (tmp_path / "old.json").write_text(json.dumps(old))
    (tmp_path / "new.json").write_text(json.dumps(new))
    (tmp_path / "dump" / "g").mkdir(parents=True)
    for moment, data in (("before", old), ("after", new)):
        (tmp_path / "dump" / "g" / f"00-swap.{moment}.json").write_text(json.dumps(data))
    return tmp_path


def test_the_same_graph_written_down_differently_exits_with_0(capsys, tmp_path):
    data = random_graph(4)
    (tmp_path / "a.json").write_text(json.dumps(data))
    (tmp_path / "b.json").write_text(json.dumps(rewritten_down(data, 1)))
    code, out, _ = run(capsys, tmp_path / "a.json", tmp_path / "b.json")
    assert (code, out) == (0, f"the same: {len(data['nodes'])} nodes\n")


def test_another_graph_exits_with_1_and_says_what_differs(capsys, files):
    code, out, _ = run(capsys, files / "old.json", files / "new.json")
    assert code == 1
    assert "  rewritten: %n1: target aten.sin.default -> aten.cos.default\n" in out
    assert "\x1b" not in out


def test_a_dump_is_told_pass_by_pass(capsys, files):
    code, out, _ = run(capsys, files / "dump")
    assert code == 1
    assert out.startswith("g: 4 nodes captured\n  swap: 4 nodes -> 4 nodes: 1 rewritten; 1 applied\n")
    assert run(capsys, files / "dump", files / "dump")[0] == 0
    assert run(capsys, files / "dump", files / "new.json")[0] == 0


@pytest.mark.parametrize(
    ("format", "starts"),
    [
        ("json", '{\n "schema": "k3diff/1"'),
        ("mermaid", "flowchart TD"),
        ("dot", "digraph"),
        ("html", "<!doctype html>"),
    ],
)
def test_formats_go_to_stdout_or_a_file(capsys, files, format, starts):
    code, out, _ = run(capsys, files / "dump", "--format", format)
    assert code == 1
    assert out.startswith(starts)
    run(capsys, files / "dump", "--format", format, "-o", files / "out")
    assert (files / "out").read_text() == out


def test_json_holds_the_costs_at_given_sizes(capsys, tmp_path):
    data = random_graph(4, writes=0)
    (tmp_path / "a.json").write_text(json.dumps(data))
    out = run(capsys, tmp_path / "a.json", tmp_path / "a.json", "--format", "json")[1]
    assert "launches" in json.loads(out)["costs"]["before"]


def test_onnx_is_binary_and_wants_a_file(capsys, files):
    onnx = pytest.importorskip("onnx")
    assert run(capsys, files / "dump", "--format", "onnx")[0] == 2
    assert run(capsys, files / "dump", "--format", "onnx", "-o", files / "d.onnx")[0] == 1
    onnx.load(files / "d.onnx")


def test_a_budget_decides_the_exit_code_and_writes_junit(capsys, files):
    (files / "b.toml").write_text('applied.swap = ">= 1"\nops.aten.sin.default = 0\n')
    code, out, _ = run(capsys, files / "dump", "--budget", files / "b.toml", "--junit", files / "j.xml")
    assert (code, out) == (0, "ok   applied.swap >= 1\nok   ops.aten.sin.default = 0\n")
    (files / "b.toml").write_text("nodes = 3\n")
    code, out, _ = run(capsys, files / "dump", "--budget", files / "b.toml", "--junit", files / "j.xml")
    assert (code, out) == (1, "FAIL nodes = 3\n     nodes is 4, allowed: = 3\n")
    assert 'failures="1"' in (files / "j.xml").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["old.jso"], "did you mean"),
        (["old.json"], "is one graph; name another to compare it with"),
        (["dump", "--after", "swp"], "no stage 'swp' (did you mean 'swap'?)"),
        (["old.json", "new.json", "--ignore", "strid"], "cannot ignore 'strid' (did you mean 'stride'?)"),
        (["old.json", "new.json", "--at", "s0"], "--at has s0; expected sizes such as p.0=64,u0=3"),
        (["old.json", "new.json", "--junit", "x.xml"], "--junit writes the results of --budget"),
        (["dump", "--disable", "latent_tail"], "--disable compares a checkpoint with itself"),
        (["dump", "--budget", "none.toml"], "none.toml: No such file"),
        ([".", "dump"], "holds no dumped graph"),
    ],
)
def test_misuse_exits_with_2_and_one_line(capsys, files, monkeypatch, arguments, said):
    monkeypatch.chdir(files)
    (files / "dump2").mkdir()
    if arguments[0] == ".":
        monkeypatch.chdir(files / "dump2")
        (files / "dump2" / "x").write_text("")
        arguments = [".", files / "dump"]
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_comparing_files_starts_no_torch(files):
    code = (
        "import sys\nfrom k3compile.cli.main import main\n"
        f"try:\n    main(['diff', {str(files / 'old.json')!r}, {str(files / 'new.json')!r}])\n"
        "except SystemExit as stop:\n    assert stop.code == 1\nassert 'torch' not in sys.modules\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}, check=False
    )
    assert run.returncode == 0, run.stderr
