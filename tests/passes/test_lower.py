"""What computes each op is decided once and said in a remark; a named implementation is obeyed or refused."""

import pytest
import torch
import torch.distributed as dist
from compiled import Compiled
from k3compile.kernels import norm
from k3compile.kernels.op import OPS, Op, Tolerance
from k3compile.passes.lower import Lower, op_of
from k3compile.passes.runner import Context, Fuel, PassError, run_passes
from k3compile.runtime.parallel.collectives import all_reduce
from k3compile.runtime.parallel.ranks import group
from torch._inductor.decomposition import select_decomp_table

ops = torch.ops.k3


@pytest.fixture(scope="module")
def doubling():
    """An op with three implementations: ``coarse`` has its own tolerance, ``picky`` takes at most 4 rows and
    ``loud`` refuses everything.
    """

    def k3test_double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    made = norm.op()(k3test_double)
    made.fake(lambda x: torch.empty_like(x))

    @made.impl("coarse", tolerance=Tolerance(bfloat16=0.2, float32=0.2))
    def coarse(x):
        return x * 2.25

    @made.impl("loud", objection=lambda x: "it never can")
    def loud(x):
        raise AssertionError("chosen against its objection")

    @made.impl(
        "picky", objection=lambda x: None if isinstance(x.shape[0], int) and x.shape[0] <= 4 else "too long"
    )
    def picky(x):
        return x + x + 0.25 - 0.25

    yield made
    del OPS["k3test_double"]


def lowered(fn, *args, dynamic=False, **how):
    compiled = Compiled(fn, (Lower(**how),), dynamic=dynamic)
    return compiled, compiled(*args)


def said(compiled: Compiled) -> dict[str, str]:
    return {r.op: f"{r.kind}: {r.reason}" for r in compiled.remarks(name="lower")}


def test_a_pure_op_is_opened_where_the_compiler_fuses_and_only_there():
    x, w = torch.randn(3, 8), torch.randn(8)

    def fn(x, w):
        return ops.rms_norm(x, w, 1e-5)

    open_, result = lowered(fn, x, w, fuses=True)
    assert said(open_) == {"k3.rms_norm": "applied: opened"}
    assert "k3.rms_norm.default" not in open_.targets()
    assert torch.equal(result, fn(x, w))
    closed, _ = lowered(fn, x, w)
    assert said(closed) == {"k3.rms_norm": "note: computed by its meaning"}
    assert closed.targets() == ["k3.rms_norm.default"]


def test_an_op_that_writes_or_looks_at_values_stays_one_call():
    window = torch.zeros(2, 3, 6).double()  # in float64 nothing but the meaning computes it

    def fn(x, w, window, slots, cu):
        return ops.short_conv(x, w, window, slots, cu)

    rows = torch.tensor([1]), torch.tensor([0, 4])
    args = torch.randn(4, 6).double(), torch.randn(6, 4).double(), window, *rows
    compiled, _ = lowered(fn, *args, fuses=True)
    assert said(compiled) == {"k3.short_conv": "note: stays one call: it writes its arguments"}
    assert "auto_functionalized_v2" in compiled.targets()


def test_the_first_implementation_without_objection_is_called(doubling: Op):
    compiled, result = lowered(lambda x: ops.k3test_double(x), torch.ones(3))
    assert said(compiled) == {"k3.k3test_double": "applied: computed by picky"}
    assert compiled.targets() == ["k3.k3test_double.picky"]
    assert torch.equal(result, torch.full((3,), 2.0))


def test_objections_are_reported_with_the_choice(doubling: Op):
    compiled, _ = lowered(lambda x: ops.k3test_double(x), torch.ones(9))
    (remark,) = compiled.remarks(name="lower")
    assert remark.reason == "computed by its meaning"
    assert remark.detail == "loud: it never can; picky: too long"


def test_a_named_implementation_is_obeyed(doubling: Op):
    for provider in ("meaning", "open", "picky"):
        compiled, _ = lowered(
            lambda x: ops.k3test_double(x), torch.ones(3), providers={"k3test_double": provider}
        )
        expected = {
            "meaning": "k3.k3test_double.default",
            "open": "aten.mul.Tensor",
            "picky": "k3.k3test_double.picky",
        }
        assert compiled.targets() == [expected[provider]]


def test_one_that_is_coarser_than_its_op_is_only_taken_where_it_is_named(doubling: Op):
    x = torch.randn(3, 5)
    compiled, result = lowered(lambda x: ops.k3test_double(x), x)
    assert "coarse" not in said(compiled)["k3.k3test_double"]
    compiled, result = lowered(lambda x: ops.k3test_double(x), x, providers={"k3test_double": "coarse"})
    assert said(compiled) == {"k3.k3test_double": "applied: computed by coarse"}
    assert torch.equal(result, x * 2.25)


def test_a_named_implementation_that_objects_raises_with_its_reason(doubling: Op):
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"cannot be obeyed.*it never can"):
        lowered(lambda x: ops.k3test_double(x), torch.ones(3), providers={"k3test_double": "loud"})


def test_opening_on_request_raises_where_it_cannot():
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="it writes its arguments"):
        lowered(
            lambda x, p, t, s, c: ops.mla_write(x, p, t, s, c),
            torch.randn(2, 4),
            torch.zeros(2, 2, 4),
            torch.ones(1, 1, dtype=torch.int64),
            torch.zeros(1, dtype=torch.int64),
            torch.tensor([0, 2]),
            providers={"mla_write": "open"},
        )


def test_without_fuel_nothing_is_opened():
    compiled = Compiled(lambda x, w: ops.rms_norm(x, w, 1e-5), (Lower(fuses=True),), fuel=Fuel(0))
    compiled(torch.randn(3, 8), torch.randn(8))
    assert said(compiled) == {"k3.rms_norm": "missed: no fuel"}


def test_an_op_inside_an_opened_meaning_is_decided_too(monkeypatch):
    monkeypatch.setattr(
        OPS["l2_norm"], "open_form", lambda x, scale: ops.rms_norm(x, x.new_ones(8), 1e-5) * scale
    )
    compiled, _ = lowered(
        lambda x: ops.l2_norm(x, 2.0), torch.randn(3, 8), fuses=True, table=select_decomp_table()
    )
    assert set(said(compiled)) == {"k3.l2_norm", "k3.rms_norm"}
    assert not [t for t in compiled.targets() if t.startswith("k3.")]


def test_the_sum_of_a_group_of_one_is_its_input():
    name = group()
    compiled, result = lowered(lambda x, w: all_reduce(x @ w, name) + 1, torch.eye(3), torch.ones(3, 3))
    assert not [t for t in compiled.targets() if "c10d" in t]
    assert "aten.clone.default" not in compiled.targets()
    assert torch.equal(result, torch.full((3, 3), 2.0))
    (remark,) = compiled.remarks(name="lower")
    assert (remark.kind, remark.expected) == ("applied", {"all_reduces": -1})


def test_no_alias_of_an_input_or_of_another_result_leaves_through_a_dropped_sum():
    name = group()
    compiled, result = lowered(lambda x: all_reduce(x, name), x := torch.ones(3))
    assert compiled.targets() == ["aten.clone.default"]
    assert result.data_ptr() != x.data_ptr()

    def both(x):
        y = x * 2
        return y, all_reduce(y, name)

    _, (y, total) = lowered(both, torch.ones(3))
    assert y.data_ptr() != total.data_ptr()


def test_a_sum_over_several_ranks_stays(monkeypatch):
    name = group()
    monkeypatch.setattr("k3compile.passes.lower.ranks_of", lambda group: 8)
    compiled, _ = lowered(lambda x, w: all_reduce(x @ w, name), torch.eye(3), torch.ones(3, 3))
    assert [t for t in compiled.targets() if "all_reduce" in t]
    (remark,) = compiled.remarks(name="lower")
    assert (remark.kind, remark.reason) == ("note", "stays: its group has 8 ranks")


def test_a_reduction_that_is_not_the_identity_stays():
    name = group()

    def fn(x):
        return torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_reduce(x * 1, "band", name)
        )

    compiled = Compiled(fn, ())
    compiled(torch.ones(3, dtype=torch.int64))
    (gm,) = compiled.graphs
    (record,) = run_passes(gm, (Lower(),), Context("aten"))
    assert [r.kind for r in record.remarks] == ["missed"]
    assert dist.is_initialized()


def test_which_nodes_are_ours():
    compiled = Compiled(lambda x, w: ops.rms_norm(x.sin(), w, 1e-5), ())
    compiled(torch.randn(3, 8), torch.randn(8))
    assert [op_of(n).name for n in compiled.graphs[0].graph.nodes if op_of(n)] == ["rms_norm"]


def test_a_failing_lowering_names_itself(monkeypatch):
    monkeypatch.setattr("k3compile.passes.lower.open_node", lambda *a: 1 / 0)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as error:
        lowered(lambda x, w: ops.rms_norm(x, w, 1e-5), torch.randn(3, 8), torch.randn(8), fuses=True)
    assert isinstance(error.value.inner_exception, PassError)
    assert "lower" in str(error.value)
