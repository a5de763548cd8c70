"""Starts on a warm cache: what hits, what must miss, and that the report is there either way.

Counters of torch prove the hits; a pass that ran is a miss. Every test has a cache folder of its own.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from k3compile.passes import pipeline
from k3compile.passes.extra_inputs import add_input
from k3compile.passes.remarks import PassResult
from torch._dynamo.utils import counters

from k3compile import extra_inputs, report

ops = torch.ops.k3
pytestmark = pytest.mark.inductor


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """Inductor's cache folder, and no report of an earlier compile in this process."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    report.forget()
    yield tmp_path
    report.forget()


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache folder that holds ``gathered`` compiled with the default options."""
    folder = tmp_path_factory.mktemp("filled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        assert start().status == "compiled"
    return folder


def gathered(x, w):
    """Two sites of contiguous_views and one op to lower."""
    index = torch.arange(1, 3)
    y = ops.rms_norm(x, w, 1e-5).index_select(0, index) * 2
    return torch.zeros_like(x).index_copy_(0, index, y)


def start(fn=gathered, **options):
    """A compile as a new process would do it, as far as caches are concerned; its report."""
    torch._dynamo.reset()
    counters.clear()
    x, w = torch.randn(4, 8), torch.randn(8)
    with torch.no_grad():
        compiled = torch.compile(fn, backend="k3", options=options or None, fullgraph=True, dynamic=False)
        torch.testing.assert_close(compiled(x, w), fn(x, w))
    return report.latest()


def hits():
    """(hits, misses) of AOTAutograd's cache since the last start."""
    found = counters["aot_autograd"]
    return found["autograd_cache_hit"], found["autograd_cache_miss"]


def test_the_same_compile_again_is_a_hit_with_the_same_report(filled, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(filled))
    (stored,) = (filled / "k3").glob("*.json")
    first = report.Report.from_json(json.loads(stored.read_text()))
    again = start()
    assert hits() == (1, 0)
    assert counters["inductor"]["fxgraph_cache_hit"] == 1
    assert (again.status, again.key) == ("cached", first.key)
    assert again.remarks == first.remarks
    assert again.applied("contiguous_views") == 2
    assert again.choices == {"k3.rms_norm": "opened"}
    assert again.graphs == first.graphs
    assert again.generated == first.generated


OTHER = {
    "features": {"features": "baseline"},
    "lower": {"lower": {"rms_norm": "meaning"}},
    "verify": {"verify": "static"},
    "differential": {"verify": "differential"},
    "on_error": {"on_error": "fallback"},
    "require": {"require": {"contiguous_views": 2}},
    "disable": {"disable": ["contiguous_views"]},
    "range_source": {"range_source": "prove"},
    "inductor": {"inductor": {"epilogue_fusion": False}},
}


@pytest.mark.parametrize("name", OTHER)
def test_any_other_option_misses(name, filled, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(filled))
    made = start(**OTHER[name])
    assert (made.status, hits()) == ("compiled", (0, 1))


@pytest.mark.parametrize(("variable", "value"), [("K3_DISABLE", "contiguous_views"), ("K3_FUEL", "1")])
def test_a_switch_misses(variable, value, filled, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(filled))
    monkeypatch.setenv(variable, value)
    made = start()
    assert (made.status, hits()) == ("compiled", (0, 1))
    assert made.applied("contiguous_views") < 2


def test_where_the_report_goes_changes_nothing(filled, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(filled))
    file = tmp_path / "reports.json"
    assert start(report=str(file)).status == "cached"
    (written,) = json.loads(file.read_text())["reports"]
    assert written["status"] == "cached"
    assert any(remark["kind"] == "applied" for record in written["records"] for remark in record["remarks"])


def test_an_edited_source_misses(filled, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(filled))
    monkeypatch.setattr("k3compile.fingerprint.digest_of_sources", lambda: "edited")
    assert start().status == "compiled"
    assert hits() == (0, 1)


@pytest.mark.parametrize("damage", [lambda f: f.unlink(), lambda f: f.write_text("{")], ids=["gone", "torn"])
def test_without_its_report_a_hit_says_so(damage, filled, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(filled))
    key = start().key
    stored = filled / "k3" / f"{key}.json"
    kept = stored.read_text()
    damage(stored)
    try:
        again = start()
    finally:
        stored.write_text(kept)
    assert again.status == "cached"
    assert "its report is gone" in again.notes[-1]


class AddBias:
    """A Dynamo pass with an input of its own."""

    name, level, keeps = "add_bias", "dynamo", "numeric"

    def run(self, gm, ctx):
        bias = add_input(gm, "bias", "test_bias", torch.zeros(8), ctx)
        output = gm.graph.output_node()
        (results,) = output.args
        with gm.graph.inserting_before(output):
            output.args = (tuple(gm.graph.call_function(torch.add, (r, bias)) for r in results),)
        return PassResult(True)


def test_a_graph_with_added_inputs_is_found_again_and_still_supplied(caches, monkeypatch):
    given = torch.ones(8)
    monkeypatch.setattr(pipeline, "DYNAMO_PASSES", (AddBias(),))
    monkeypatch.setitem(extra_inputs.SUPPLIERS, "test_bias", lambda args: given)
    for number, found in enumerate([(0, 1), (1, 0)]):
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(lambda x: x * 2, backend="k3", fullgraph=True, dynamic=False)
        with torch.no_grad():
            for _ in range(2):
                given = given + 1 + number
                assert torch.equal(compiled(torch.ones(4, 8)), torch.full((4, 8), 2.0) + given)
        assert hits() == found
    assert report.latest().status == "cached"


def test_islands_cache_their_own_code_and_the_passes_run_each_time(caches):
    def two(x, w):
        return (x @ w.view(8, 1)).sin().exp()

    def other(x, w):
        return (x @ w.view(8, 1)).cos().exp()

    assert start(two, inner="islands:inductor").status == "compiled"
    again = start(two, inner="islands:inductor")
    assert (again.status, again.applied("islands")) == ("compiled", 1)
    assert counters["inductor"]["fxgraph_cache_hit"] == 1
    start(other, inner="islands:inductor")
    assert counters["inductor"]["fxgraph_cache_hit"] == 0


PROGRAM = """
import json, torch
from torch._dynamo.utils import counters
from k3compile import report

def gathered(x, w):
    index = torch.arange(1, 3)
    y = torch.ops.k3.rms_norm(x, w, 1e-5).index_select(0, index) * 2
    return torch.zeros_like(x).index_copy_(0, index, y)

x, w = torch.randn(4, 8), torch.randn(8)
fn = torch.compile(gathered, backend="k3", fullgraph=True, dynamic=False)
import k3compile.kernels
with torch.no_grad():
    torch.testing.assert_close(fn(x, w), gathered(x, w))
made = report.latest()
found = counters["aot_autograd"]
print(json.dumps([made.status, made.key, found["autograd_cache_hit"],
                  [r.to_json() for r in made.remarks], [list(g) for g in made.graphs]]))
"""


TWO_BODIES = """
import json, torch
import k3compile, k3compile.kernels
from torch._dynamo.utils import counters
from k3compile import report

def moved(x, w, i, j):
    y = torch.ops.k3.rms_norm(x, w, 1e-5).index_select(0, i) * 2
    return torch.zeros_like(x).index_copy_(0, j, y)

x, w, rows = torch.randn(4, 8), torch.randn(8), ((1, 3), (2, 4))
given = [k3compile.annotate_range(torch.arange(*r), *r) for r in rows]
fn = torch.compile(moved, backend="k3", fullgraph=True, dynamic=False)
with torch.no_grad():
    for indices in (given, [torch.tensor([3, 0]), torch.tensor([1, 2])]):
        torch.testing.assert_close(fn(x, w, *indices), moved(x, w, *indices))
made, found = report.latest(), counters["aot_autograd"]
print(json.dumps([made.status, made.key, found["autograd_cache_hit"], found["autograd_cache_miss"],
                  [r.to_json() for r in made.remarks], [list(g) for g in made.graphs]]))
"""


def process(folder, program=PROGRAM, **environment):
    """Start ``program``; its output is read by :func:`answer`."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )


def answer(started):
    out, err = started.communicate(timeout=300)
    assert started.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def test_processes_agree_whatever_their_hash_seed_and_fill_one_cache_together(tmp_path):
    together = [process(tmp_path, PYTHONHASHSEED=seed) for seed in ("0", "77")]
    first, second = map(answer, together)
    status, key, found, remarks, graphs = answer(process(tmp_path, PYTHONHASHSEED="4242"))
    assert (status, found) == ("cached", 1)
    assert first[1] == second[1] == key
    assert first[3:] == second[3:] == [remarks, graphs]
    assert [p.name for p in (tmp_path / "k3").glob("*.json*")] == [f"{key}.json"]


def test_both_bodies_of_a_graph_are_found_again_whatever_the_hash_seed(tmp_path):
    first = answer(process(tmp_path, TWO_BODIES, PYTHONHASHSEED="0"))
    assert first[:1] + first[2:4] == ["compiled", 0, 2]
    together = [process(tmp_path, TWO_BODIES, PYTHONHASHSEED=seed) for seed in ("77", "4242")]
    for again in map(answer, together):
        assert again == ["cached", first[1], 2, 0, *first[4:]]
