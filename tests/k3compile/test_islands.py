"""Another backend gets islands and nothing else, is called as Dynamo calls it, and is not trusted."""

import dataclasses

import pytest
import torch
from small_models import SMALL, Row, make_step, small_model
from torch._dynamo.backends.registry import _COMPILER_FNS, register_backend

from k3compile import islands, report
from k3compile.options import CompileOptions, parse

pytestmark = pytest.mark.usefixtures("own_reports")
AOT = "islands:aot_eager"
INDUCTOR = pytest.param("islands:inductor", marks=pytest.mark.inductor)


def compiled(fn, inner=AOT, dynamic=None, **options):
    torch._dynamo.reset()
    return torch.compile(
        fn, backend="k3", options={"inner": inner, **options}, fullgraph=True, dynamic=dynamic
    )


def mlp(x, w):
    return torch.nn.functional.silu(x @ w) @ w.t()


def values(rows=4, seed=0):
    torch.manual_seed(seed)
    return torch.randn(rows, 8), torch.randn(8, 8)


@pytest.fixture
def fake():
    """A registered backend that counts its calls; what its code does with a graph is set by the test."""

    class Fake:
        runs = 0
        fails = False

        def __init__(self):
            self.calls = []
            self.results = lambda gm, args: gm(*args)

        def __call__(self, gm, inputs):
            self.calls.append((gm, inputs))
            if self.fails:
                raise KeyError("no such thing\nand more")

            def run(*args):
                self.runs += 1
                return self.results(gm, args)

            return run

    made = Fake()
    register_backend(made, name="fake_islands")
    yield made
    _COMPILER_FNS.pop("fake_islands")


@pytest.mark.parametrize("inner", [AOT, "aot_eager_decomp_partition", INDUCTOR])
def test_an_mlp_is_compiled_whole_for_all_sizes(inner):
    fn = compiled(mlp, inner, dynamic=True)
    with torch.no_grad():
        for rows in (4, 9):
            torch.testing.assert_close(fn(*values(rows)), mlp(*values(rows)))
    made = report.latest()
    assert (made.status, made.inner) == ("compiled", inner)
    assert made.applied("islands") == 1
    assert made.missed("islands") == []
    assert len(report.all()) == 1


def test_the_backend_is_called_as_dynamo_calls_one(fake):
    fn = compiled(mlp, "fake_islands")
    with torch.no_grad():
        for seed in range(3):
            assert torch.equal(fn(*values(seed=seed)), mlp(*values(seed=seed)))
    ((gm, inputs),) = fake.calls
    assert isinstance(gm, torch.fx.GraphModule)
    inside = gm.graph.find_nodes(op="placeholder")
    assert [n.meta["example_value"] is v for n, v in zip(inside, inputs, strict=True)] == [True, True]
    assert [(tuple(t.shape), t.stride()) for t in inputs] == [((4, 8), (8, 1)), ((8, 8), (8, 1))]
    assert isinstance(gm.graph.output_node().args[0], tuple)
    assert fake.runs == 3


@pytest.mark.parametrize("inner", [AOT, INDUCTOR])
@pytest.mark.slow
def test_a_k3_layer_gives_its_projections_away_and_keeps_its_state(inner):
    config = dataclasses.replace(
        SMALL, num_hidden_layers=1, kda_layers=(0,), attn_res_block_size=0, first_k_dense_replace=1
    )
    model = small_model(config, torch.float32)
    step = make_step([Row([3, 4, 5], slot=1), Row([7], slot=2)])

    def run(layer):
        pools = model.make_pools(4, 4, 4, 3)
        for pool in pools:
            for t in pool:
                t.zero_()
        with torch.no_grad():
            return model(step, pools, layer=layer), pools

    (want, _), want_pools = run(lambda layer, *args: layer(*args))
    fn = compiled(type(model.layers[0]).forward, inner, dynamic=False)
    (got, _), got_pools = run(fn)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    for a, b in zip(got_pools[0], want_pools[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    made = report.latest()
    assert made.applied("islands") >= 2
    taken = [r.detail for r in made.remarks if (r.pass_name, r.kind) == ("islands", "applied")]
    assert any("mm x" in words for words in taken)
    assert not any("k3." in words for words in taken)
    assert "it is a k3 op" in made.missed("islands")
    assert "a size depends on data" in made.missed("islands")


def written(x, w, pool):
    y = mlp(x, w)
    pool.add_(y.sum())
    return y, pool[1:], (y * pool.sum()).exp()


def test_mutation_and_a_view_of_an_input_are_as_in_eager():
    fn = compiled(written)
    with torch.no_grad():
        for seed in range(2):
            pools = [torch.ones(3, 2), torch.ones(3, 2)]
            got, want = (f(*values(seed=seed), p) for f, p in zip((fn, written), pools))
            for a, b in zip((*got, pools[0]), (*want, pools[1]), strict=True):
                torch.testing.assert_close(a, b)
            assert got[1].untyped_storage().data_ptr() == pools[0].untyped_storage().data_ptr()
    assert "it writes state" in report.latest().missed("islands")
    assert report.latest().applied("islands") >= 1


def test_nothing_is_taken_where_a_size_depends_on_data():
    def f(x, w, n):
        rows = n[0].item()
        torch._check(rows >= 0)
        torch._check(rows <= x.shape[0])
        return mlp(x[:rows], w)

    fn = compiled(f)
    with torch.no_grad():
        for rows in (0, 2, 4):
            n = torch.tensor([rows])
            assert torch.equal(fn(*values(), n), f(*values(), n))
    assert report.latest().applied("islands") == 0
    assert "a size depends on data" in report.latest().missed("islands")


def test_a_training_graph_is_handed_on_whole(fake):
    x, w = values()
    w.requires_grad_()
    compiled(mlp, "fake_islands")(x, w).sum().backward()
    got, w.grad = w.grad, None
    mlp(x, w).sum().backward()
    torch.testing.assert_close(got, w.grad)
    made = report.latest()
    assert made.status == "handed on"
    assert made.notes == ("no islands are taken of a graph without passes: compiled with aot_eager",)
    assert fake.calls == []


def test_a_compiler_that_fails_costs_the_island_or_the_compile(fake, caplog):
    fake.fails = True
    with torch.no_grad():
        with pytest.raises(Exception, match="island_0: fake_islands failed on it: KeyError"):
            compiled(mlp, "fake_islands")(*values())
        fn = compiled(mlp, "fake_islands", on_error="fallback")
        assert torch.equal(fn(*values()), mlp(*values()))
    assert "stays ours: fake_islands failed on it: KeyError: 'no such thing" in caplog.text
    (reason,) = report.latest().missed("islands")
    assert reason.startswith("fake_islands failed on it: KeyError")


WRONG = {
    "it returned NoneType and not a tuple of 1": lambda gm, args: None,
    "it returned Tensor and not a tuple of 1": lambda gm, args: gm(*args)[0],
    "result 0 is a int and not a tensor": lambda gm, args: (3,),
    "result 0 is torch.float64 on cpu, not torch.float32 on cpu": lambda gm, args: (gm(*args)[0].double(),),
    "result 0 has shape (3, 8), not (4, 8)": lambda gm, args: (gm(*args)[0][1:],),
    "IndexError: tuple index out of range": lambda gm, args: args[9],
}


@pytest.mark.parametrize("says", WRONG)
def test_wrong_results_are_seen_at_the_call(fake, says, caplog):
    fake.results = WRONG[says]
    with torch.no_grad():
        with pytest.raises(islands.IslandError) as error:
            compiled(mlp, "fake_islands")(*values())
        assert str(error.value) == f"island_0, compiled by fake_islands: {says}"
        fn = compiled(mlp, "fake_islands", on_error="fallback")
        runs = fake.runs
        for seed in range(3):
            assert torch.equal(fn(*values(seed=seed)), mlp(*values(seed=seed)))
    assert fake.runs == runs + 1, "once it was wrong it is not asked again"
    assert f"island_0 is not computed by fake_islands any more: {says}" in caplog.text


def test_islands_are_held_to_differential_verification(fake):
    with torch.no_grad():
        fn = compiled(mlp, "fake_islands", verify="differential")
        assert torch.equal(fn(*values()), mlp(*values()))
        assert report.latest().applied("islands") == 1
        fake.results = lambda gm, args: tuple(r + 1 for r in gm(*args))
        with pytest.raises(Exception, match="pass islands failed"):
            compiled(mlp, "fake_islands", verify="differential")(*values())


def test_a_result_in_another_layout_is_laid_out_as_traced(fake):
    fake.results = lambda gm, args: tuple(r.t().contiguous().t() for r in gm(*args))
    with torch.no_grad():
        result = compiled(lambda x, w: mlp(x, w).view(-1), "fake_islands")(*values())
    assert torch.equal(result, mlp(*values()).view(-1))


def test_an_absent_library_gets_one_line_that_names_the_extra(monkeypatch):
    for name in ("tensorrt", "islands:tensorrt"):
        with pytest.raises(ValueError) as error:
            parse({"inner": name})
        (_, line) = str(error.value).splitlines()
        assert line.strip() == (
            f"inner is {name!r}, whose library torch_tensorrt is not installed: "
            "pip install 'k3compile[tensorrt]'"
        )


def test_a_library_is_imported_when_its_backend_is_first_used(fake, monkeypatch, tmp_path):
    (tmp_path / "fake_tensorrt.py").write_text(
        "from torch._dynamo.backends.registry import register_backend, lookup_backend\n"
        "register_backend(lookup_backend('fake_islands'), name='tensorrt')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(islands.REGISTERED_BY, "tensorrt", "fake_tensorrt")
    try:
        with torch.no_grad():
            assert torch.equal(compiled(mlp, "tensorrt")(*values()), mlp(*values()))
    finally:
        _COMPILER_FNS.pop("tensorrt", None)
    assert len(fake.calls) == 1
    assert report.latest().inner == "tensorrt"


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match="inner is 'islands:inductr'"):
        CompileOptions(inner="islands:inductr")
    with pytest.raises(ValueError, match="inner is 3"):
        CompileOptions(inner=3)
    assert islands.compiler_of("inductor") is None
    assert islands.compiler_of("islands:eager") == "eager"
    assert islands.compiler_of("tvm") == "tvm"
