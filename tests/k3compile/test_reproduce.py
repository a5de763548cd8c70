"""A failed compile leaves a folder that fails again, without anything of the user's in it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from k3compile.passes import pipeline
from k3compile.passes.graph import emit
from k3compile.passes.remarks import PassResult

from k3compile import report
from k3compile.reproduce import Input, evaluate, without_values
from k3compile.torch_private import InductorError

pytestmark = pytest.mark.usefixtures("own_reports")
AGAIN = """
import runpy, torch
from k3compile.passes import pipeline
from k3compile.passes.graph import emit
from k3compile.passes.remarks import PassResult
class Swap:
    name, level, keeps = "contiguous_views", "aten", "exact"
    def run(self, gm, ctx):
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
            with gm.graph.inserting_before(node):
                new = emit(gm.graph, torch.ops.aten.add.Tensor, node.args, like=node, mode=ctx.fake_mode)
            node.replace_all_uses_with(new)
        return PassResult(True)
pipeline.ATEN_PASSES = (Swap(),)
runpy.run_path({path!r}, run_name="__main__")
"""


class Swap:
    """A pass that does the wrong thing without any error, the one of AGAIN."""

    name, level, keeps = "contiguous_views", "aten", "exact"

    def run(self, gm, ctx):
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
            with gm.graph.inserting_before(node):
                new = emit(gm.graph, torch.ops.aten.add.Tensor, node.args, like=node, mode=ctx.fake_mode)
            node.replace_all_uses_with(new)
        return PassResult(True)


class Broken:
    name, level, keeps = "contiguous_views", "aten", "exact"

    def run(self, gm, ctx):
        raise IndexError("no such thing")


def program(x, w, n):
    count = n[0].item()
    torch._check(count >= 0)
    torch._check(count <= x.shape[0])
    return torch.ops.k3.rms_norm(x.index_select(0, torch.arange(count)), w, 1e-5) * 2


def failing(match, args, **options):
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match=match) as error:
        torch.compile(program, backend="k3", fullgraph=True, options={"inner": "aot_eager", **options})(*args)
    (line,) = [line for line in str(error.value).splitlines() if line.startswith("reproducer: python ")]
    return Path(line.removeprefix("reproducer: python ")).parent


def arguments():
    x = torch.full((7, 3), 0.1234567)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    return x, torch.full((3,), 0.7654321), torch.tensor([4])


def test_the_folder_fails_again_in_a_new_process(monkeypatch, own_reports):
    monkeypatch.setattr(pipeline, "ATEN_PASSES", (Swap(),))
    folder = failing("it changed what the graph computes", arguments(), verify="differential")
    assert folder.parent == own_reports
    command = [sys.executable, "-c", AGAIN.format(path=str(folder / "repro.py"))]
    again = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert again.returncode == 1
    assert (
        "pass contiguous_views failed: it changed what the graph computes (exact): output 0" in again.stderr
    )


@pytest.mark.slow
def test_a_reproducer_of_a_compile_that_works_runs_through(monkeypatch, own_reports):
    monkeypatch.setattr(pipeline, "ATEN_PASSES", (Broken(),))
    folder = failing("pass contiguous_views failed: no such thing", arguments())
    done = subprocess.run([sys.executable, folder / "repro.py"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_nothing_of_the_users_tensors_is_in_the_folder(monkeypatch):
    monkeypatch.setattr(pipeline, "ATEN_PASSES", (Swap(),))
    folder = failing("it changed what the graph computes", arguments(), verify="differential")
    texts = [file.read_text() for file in folder.iterdir()]
    assert sorted(f.name for f in folder.iterdir()) == ["error.txt", "graph.json", "graph.txt", "repro.py"]
    assert not [t for t in texts if "0.1234" in t or "0.7654" in t]
    assert not [t for t in texts if " and is " in t], "the message of the verification quotes values"
    assert "differs at [" in (folder / "error.txt").read_text()


def test_the_folder_says_what_is_needed_to_understand_it(monkeypatch):
    monkeypatch.setattr(pipeline, "ATEN_PASSES", (Broken(),))
    folder = failing("no such thing", arguments())
    assert json.loads((folder / "graph.json").read_text())["schema"] == "k3graph/1"
    said = (folder / "error.txt").read_text()
    assert "IndexError: no such thing" in said
    assert "'inner': 'aot_eager'" in said
    assert torch.__version__ in said
    assert "k3.rms_norm" in (folder / "graph.txt").read_text()


def test_k3_dump_takes_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("K3_DUMP", str(tmp_path / "dump"))
    monkeypatch.setattr(pipeline, "ATEN_PASSES", (Broken(),))
    assert failing("no such thing", arguments()).parent == tmp_path / "dump"


def test_an_undone_pass_leaves_one_too_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(pipeline, "ATEN_PASSES", (Broken(),))
    torch._dynamo.reset()
    args = arguments()
    with torch.no_grad():
        options = {"inner": "aot_eager", "on_error": "fallback"}
        fn = torch.compile(program, backend="k3", fullgraph=True, options=options)
        assert torch.equal(fn(*args), program(*args))
    (note,) = report.latest().notes
    assert note.startswith(
        "pass contiguous_views failed and was undone (IndexError: no such thing); reproducer: "
    )
    assert Path(note.split("python ")[1]).exists()
    assert note in caplog.text


def test_an_error_of_the_inner_compiler_has_one(monkeypatch):
    from k3compile import backend

    def inductor(*args):
        raise InductorError(RuntimeError("no such template"), None)

    monkeypatch.setattr(backend.inner, "inductor", inductor)
    assert (failing("no such template", arguments(), inner="inductor") / "repro.py").exists()


def test_what_cannot_be_obeyed_has_none(own_reports):
    torch._dynamo.reset()
    options = {"inner": "aot_eager", "require": {"contiguous_views": 9}}
    fn = torch.compile(program, backend="k3", fullgraph=True, options=options)
    with torch.no_grad(), pytest.raises(Exception, match="applied 1 of the required 9") as error:
        fn(*arguments())
    assert "reproducer" not in str(error.value)


def test_inputs_are_made_from_sizes_that_may_be_symbols():
    made = Input(("s0", "s0 + 1"), ("s0 + 1", 1), torch.int64, bound=3).make({"s0": 4})
    assert made.shape == (4, 5)
    assert 0 <= made.min() <= made.max() < 3
    assert evaluate("Max(1, u0)*3", {"u0": 0}) == 3


def test_values_are_cut_from_messages():
    assert without_values("output 0 was 0.5 and is nan at [1, 2]; x") == "output 0 differs at [1, 2]; x"
