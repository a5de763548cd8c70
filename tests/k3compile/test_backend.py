"""The backend: what it computes, when it hands a graph on, and that it always says what it did."""

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from k3compile.passes import pipeline
from k3compile.passes.remarks import PassResult, Remark

from k3compile import backend, report
from k3compile.options import CompileOptions
from k3compile.torch_private import InductorError

ops = torch.ops.k3
pytestmark = pytest.mark.usefixtures("own_reports")


def compiled(fn, dynamic=None, fullgraph=True, **options):
    torch._dynamo.reset()
    return torch.compile(fn, backend="k3", options=options or None, fullgraph=fullgraph, dynamic=dynamic)


def mixed(x, w, sizes, pool, slots, cu):
    """Gather, advance a pool, scatter: the shape of a KDA layer."""
    nv = sizes[0].item()
    torch._check(nv >= 0)
    torch._check(nv <= x.shape[0])
    verify, other = torch.arange(nv), torch.arange(nv, x.shape[0])
    y = ops.rms_norm(x, w, 1e-5)
    head = y.index_select(0, verify) * 2
    tail = ops.short_conv(y.index_select(0, other), x.new_ones(x.shape[1], 4), pool, slots, cu)
    out = torch.zeros_like(x)
    out.index_copy_(0, verify, head)
    out.index_copy_(0, other, tail)
    return out


def arguments(rows=7, verify=3, seed=0):
    torch.manual_seed(seed)
    x = torch.randn(rows, 8)
    return (
        x,
        torch.randn(8),
        torch.tensor([verify]),
        torch.randn(2, 3, 8),
        torch.tensor([1]),
        torch.tensor([0, rows - verify]),
    )


@pytest.mark.parametrize("inner", ["aot_eager", "eager"])
def test_compiled_and_eager_agree_in_every_bit_pools_included(inner):
    fn = compiled(mixed, inner=inner, lower={"short_conv_export": "meaning"})  # C++ rounds otherwise
    with torch.no_grad():
        for seed in range(3):
            got, want = arguments(seed=seed), arguments(seed=seed)
            assert torch.equal(fn(*got), mixed(*want))
            assert torch.equal(got[3], want[3])
    made = report.latest()
    assert (made.status, made.inner) == ("compiled", inner)
    assert made.applied("contiguous_views") >= 3
    assert "k3.rms_norm" in made.choices


def test_no_pool_is_cloned_on_the_way(monkeypatch):
    graphs = []
    real = backend.inner.boxed
    monkeypatch.setattr(backend.inner, "boxed", lambda gm, by_node: graphs.append(gm) or real(gm, by_node))
    with torch.no_grad():
        compiled(mixed, inner="aot_eager")(*arguments())
    (gm,) = graphs
    targets = [str(n.target) for n in gm.graph.nodes]
    assert "auto_functionalized_v2" not in targets
    assert "aten.copy_.default" not in targets


def test_a_training_graph_is_handed_on_with_its_ops_opened():
    layer = torch.nn.Linear(8, 8)
    w = torch.ones(8, requires_grad=True)

    def loss(x):
        return ops.rms_norm(layer(x), w, 1e-5).square().sum()

    x = torch.randn(3, 8)
    loss(x)  # eager runs, but the op itself cannot be differentiated
    compiled(loss, inner="aot_eager")(x).backward()
    made = report.latest()
    assert made.status == "handed on"
    assert "requires a gradient" in made.reason
    assert made.notes == ("1 k3 ops opened before tracing",)
    got, layer.weight.grad = layer.weight.grad, None
    unit = layer(x)
    unit = unit * torch.rsqrt(unit.square().mean(-1, keepdim=True) + 1e-5)
    (unit * w).square().sum().backward()
    torch.testing.assert_close(got, layer.weight.grad)


def test_weights_that_want_gradients_do_not_make_an_inference_graph_a_training_graph():
    layer = torch.nn.Linear(8, 8)
    with torch.no_grad():
        compiled(layer, inner="aot_eager")(torch.randn(3, 8))
    assert report.latest().status == "compiled"


def test_another_torch_version_gets_its_graph_untouched(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.99.1")
    with torch.no_grad():
        result = compiled(lambda x: x + 1, inner="aot_eager")(torch.ones(2))
    assert torch.equal(result, torch.full((2,), 2.0))
    made = report.latest()
    assert (made.status, made.records) == ("handed on", ())
    assert "torch 2.99.1 is not the 2.13" in made.reason


class Broken:
    """A pass that changes the graph and then fails."""

    name, level, keeps = "contiguous_views", "aten", "exact"

    def run(self, gm, ctx):
        for node in list(gm.graph.nodes):
            if node.target is torch.ops.aten.add.Tensor:
                node.args = (node.args[0], 1000)
        raise IndexError("no such thing")


def test_a_failing_pass_raises_with_its_name_or_is_undone(monkeypatch):
    monkeypatch.setattr(pipeline, "ATEN_PASSES", (Broken(),))
    with torch.no_grad():
        with pytest.raises(Exception, match="pass contiguous_views failed: no such thing"):
            compiled(lambda x: x + 1, inner="aot_eager")(torch.ones(2))
        fn = compiled(lambda x: x + 1, inner="aot_eager", on_error="fallback")
        assert torch.equal(fn(torch.ones(2)), torch.full((2,), 2.0))
    (remark,) = [r for r in report.latest().remarks if r.pass_name == "contiguous_views"]
    assert "failed and was undone: IndexError" in remark.reason


class Curious:
    """A pass that asks a question whose answer is a guard."""

    name, level, keeps = "contiguous_views", "aten", "exact"

    def run(self, gm, ctx):
        (x, *_) = [
            n.meta["val"] for n in gm.graph.find_nodes(op="placeholder") if hasattr(n.meta["val"], "shape")
        ]
        bool(x.shape[0] < 100)
        return PassResult(False)


def test_a_guard_that_a_pass_adds_is_reported(monkeypatch):
    monkeypatch.setattr(pipeline, "ATEN_PASSES", (Curious(),))
    with torch.no_grad():
        compiled(lambda x: x + 1, dynamic=True, inner="aot_eager")(torch.ones(5))
    assert [n for n in report.latest().notes if n.startswith("a pass added the guard") and "100" in n]


def test_our_own_passes_add_no_guard():
    with torch.no_grad():
        compiled(mixed, dynamic=True, inner="aot_eager")(*arguments())
    assert report.latest().notes == ()


def test_dynamo_calling_twice_for_one_artifact_leaves_one_report():
    calls = []

    class Normed(torch.nn.Module):
        eps = 0.3  # a float input under dynamic=True, until AOTAutograd finds an op that wants a constant

        def forward(self, x):
            return ops.rms_norm(x, x.new_ones(3), self.eps)

    def twice(gm, inputs):
        calls.append(gm)
        return backend.compile_graph(gm, inputs, CompileOptions(inner="aot_eager"))

    torch._dynamo.reset()
    with torch.no_grad():
        result = torch.compile(Normed(), backend=twice, dynamic=True)(torch.ones(2, 3))
    assert torch.equal(result, Normed()(torch.ones(2, 3)))
    assert len(calls) == 2, "torch no longer restarts here: find another program that does"
    assert len(report.all()) == 1


def test_required_sites_are_counted():
    with torch.no_grad():
        compiled(mixed, inner="aot_eager", require={"contiguous_views": 2})(*arguments())
        with pytest.raises(Exception, match=r"contiguous_views applied \d of the required 50 sites"):
            compiled(mixed, inner="aot_eager", require={"contiguous_views": 50})(*arguments())
        compiled(lambda x: x + 1, inner="aot_eager", require={"contiguous_views": 50})(torch.ones(2))


@pytest.mark.parametrize("ranks", [1, 8])
def test_what_needs_several_ranks_is_on_where_there_are_several(ranks, monkeypatch):
    group = SimpleNamespace(is_initialized=lambda: ranks > 1, get_world_size=lambda: ranks)
    monkeypatch.setattr(backend, "dist", group)  # for the backend alone: Dynamo asks as well
    compiled(lambda x: x + 1, inner="eager", features=("default", "context_parallel"))(torch.ones(3))
    assert report.latest().features["context_parallel"] == ("on" if ranks > 1 else "inert")


@pytest.mark.parametrize("how", ["features", "disable", "environment"])
def test_a_pass_that_is_off_says_so_and_does_nothing(how, monkeypatch):
    options = {"inner": "aot_eager"}
    if how == "environment":
        monkeypatch.setenv("K3_DISABLE", "contiguous_views")
    else:
        options |= {"features": "baseline"} if how == "features" else {"disable": ["contiguous_views"]}
    with torch.no_grad():
        compiled(mixed, **options)(*arguments())
    made = report.latest()
    assert made.applied("contiguous_views") == 0
    assert [r.reason for r in made.remarks if r.pass_name == "contiguous_views"] == ["disabled by name"]
    assert made.features["contiguous_views"] == ("off" if how == "features" else "on")


def test_a_feature_without_a_pass_is_absent_and_not_on(monkeypatch):
    monkeypatch.setattr(backend.pipeline, "ATEN_PASSES", backend.pipeline.ATEN_PASSES[:1])
    with torch.no_grad():
        compiled(lambda x: x + 1, inner="aot_eager")(torch.ones(2))
    assert report.latest().features["latent_tail"] == "absent"
    assert report.latest().features["state_replay"] == "inert"


def test_fuel_stops_rewrites_one_by_one(monkeypatch):
    backend._fuel.clear()
    monkeypatch.setenv("K3_FUEL", "2")
    with torch.no_grad():
        got, want = arguments(), arguments()
        assert torch.equal(compiled(mixed, inner="aot_eager")(*got), mixed(*want))
    assert sum(r.kind == "applied" for r in report.latest().remarks) == 2
    backend._fuel.clear()


def test_a_dump_holds_every_pass_before_and_after(monkeypatch, tmp_path):
    tmp_path = tmp_path / "dump"
    monkeypatch.setenv("K3_DUMP", str(tmp_path))
    with torch.no_grad():
        compiled(mixed, inner="aot_eager")(*arguments())
    (folder,) = tmp_path.iterdir()
    names = sorted(p.name for p in folder.iterdir())
    assert len(names) == 4 * len(report.latest().records)
    before, after = (
        folder / next(n for n in names if n.endswith(f"views.{w}.txt")) for w in ("before", "after")
    )
    assert "aten.index_select" in before.read_text()
    assert "aten.index_select" not in after.read_text()
    json.loads(before.with_suffix(".json").read_text())


@pytest.mark.inductor
def test_what_inductor_would_get_wrong_is_compiled_by_aot_eager():
    def fn(n, x, pool):
        start = n[0].item()
        torch._check(start >= 0)
        torch._check(start <= 3)
        window = pool.narrow(0, start, 1).transpose(1, 2)  # [1, 3, 4], strided, at an offset nobody knows
        return ops.short_conv(x, x.new_ones(4, 4), window, torch.tensor([0]), torch.tensor([0, 2]))

    pool = torch.randn(4, 4, 3)
    got, want = pool.clone(), pool.clone()
    args = torch.tensor([2]), torch.randn(2, 4)
    with torch.no_grad():
        result = compiled(fn)(*args, got)
        assert torch.equal(result, fn(*args, want))
    assert torch.equal(got, want)
    made = report.latest()
    assert made.inner == "aot_eager"
    assert made.notes[0].startswith(
        "compiled with aot_eager: k3.short_conv_export.default(window) is a strided view"
    )


PROGRAM = """
import json, sys, torch
sys.path.append({helpers!r})
from small_models import SMALL, small_model
from k3compile import report
from k3compile.forward import compile_forward
import dataclasses
config = dataclasses.replace(SMALL, num_hidden_layers=1, kda_layers=(0,), attn_res_block_size=0,
                             first_k_dense_replace=1)
model = small_model(config, torch.float32)
forward = compile_forward(model, model.make_pools(3, 4, 4, 3))
made = report.latest()
print(json.dumps([made.status, [r.to_json() for r in made.remarks], made.key, made.text().split(":", 1)[1]]))
"""


@pytest.mark.inductor
def test_a_second_cached_start_has_the_same_report(tmp_path):
    helpers = os.path.join(os.path.dirname(__file__), "..", "helpers")
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    starts = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(helpers=helpers)], capture_output=True, text=True, env=env
        )
        assert done.returncode == 0, done.stderr
        starts.append(json.loads(done.stdout.splitlines()[-1]))
    (first, remarks, key, _), (second, again, same_key, _) = starts
    assert (first, second) == ("compiled", "cached")
    assert key == same_key
    assert remarks == again
    applied = [r for r in remarks if r["pass_name"] == "contiguous_views" and r["kind"] == "applied"]
    assert len(applied) == 8
    assert all(r["proofs"] for r in applied)


def test_a_remark_of_a_pass_reaches_the_report(monkeypatch):
    class Talks:
        name, level, keeps = "talks", "aten", "exact"

        def run(self, gm, ctx):
            return PassResult(False, (Remark("talks", "missed", "n", "aten.add", "because"),))

    monkeypatch.setattr(pipeline, "ATEN_PASSES", (Talks(),))
    with torch.no_grad():
        compiled(lambda x: x + 1, inner="eager")(torch.ones(2))
    assert report.latest().missed("talks") == ["because"]


def test_where_inductor_cannot_compile_opened_ops_only_pure_ones_are_opened(monkeypatch):
    tried = []

    def inductor(gm, inputs, optimise, name, patches):
        tried.append([n for n in gm.graph.nodes if str(n.target).startswith("k3.")])
        if len(tried) == 1:
            raise InductorError(RuntimeError("no such template"), None)
        return backend.inner.aot(gm, inputs, optimise, by_node=False)

    monkeypatch.setattr(backend.inner, "inductor", inductor)
    x, w = torch.randn(3, 8), torch.randn(8)
    with torch.no_grad():
        result = compiled(lambda x, w: ops.rms_norm(x, w, 1e-5), features="plain")(x, w)
    assert torch.equal(result, ops.rms_norm(x, w, 1e-5))
    assert [bool(t) for t in tried] == [False, True]
    (note,) = report.latest().notes
    assert note.startswith("only pure ops are opened: Inductor cannot compile all of them opened (")
    assert "no such template" in note
    assert report.latest().choices["k3.rms_norm"] == "opened"


def test_an_error_of_inductor_is_the_users_to_see(monkeypatch):
    def inductor(*args):
        raise InductorError(RuntimeError("no such template"), None)

    monkeypatch.setattr(backend.inner, "inductor", inductor)
    with torch.no_grad(), pytest.raises(Exception, match="no such template"):
        compiled(lambda x: x + 1)(torch.ones(2))
    assert report.all() == []


TORN = """
import pathlib, sys, torch
from k3compile import report

def scaled(x):
    return (x * 3 + 1).sin()

folder = pathlib.Path(sys.argv[1])
with torch.no_grad():
    torch.compile(scaled, backend="k3")(torch.ones(64))
    libraries = [f for f in folder.rglob("*.main.so")]
    print(len(libraries), report.latest().notes)
"""


@pytest.mark.inductor
def test_a_library_that_a_killed_compile_left_torn_is_made_again(tmp_path):
    """Two starts on one cache; between them the graph is forgotten and its library torn."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def start():
        command = [sys.executable, "-c", TORN, str(tmp_path)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    assert start().stdout.startswith("1 ()")
    (library,) = tmp_path.rglob("*.main.so")
    library.write_bytes(library.read_bytes()[:100])
    for cache in ("fxgraph", "aotautograd"):
        shutil.rmtree(tmp_path / cache)
    second = start()
    assert second.returncode == 0, second.stderr
    assert f"had left {library.name} torn: made again" in second.stdout
