"""Ops write their rows into the buffer themselves, or the report says why not."""

import k3compile.kernels  # noqa: F401  registers the ops
import pytest
import torch
from compiled import Compiled, check
from k3compile.passes.destination import twin_of
from k3compile.passes.graph import AUTO_FUNCTIONALIZED
from k3compile.passes.runner import Fuel

ops = torch.ops.k3
T, H, K, V = 5, 2, 4, 6


def args(seed=0):
    made = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=made)

    k = torch.nn.functional.normalize(normal(T, H, K), dim=-1)
    tensors = [normal(T, H, K), k, normal(T, H, V), -normal(T, H, K).abs(), normal(T, H).sigmoid()]
    return [*tensors, normal(4, H, V, K), torch.tensor([2, 1]), torch.tensor([0, 3, 5])]


def run(fn, expect):
    """Check ``fn`` against eager and give how its one scatter was done."""
    compiled = check(fn, args())
    (remark,) = compiled.remarks()
    assert remark.kind == "applied"
    calls = [n for n in compiled.graphs[0].graph.nodes if n.target in AUTO_FUNCTIONALIZED]
    assert [c.args[0].__name__.removesuffix(".default") for c in calls] == expect
    return remark.detail


def rows(start=2):
    return torch.arange(start, start + T)


def test_the_op_writes_where_the_scatter_would_have():
    def f(q, k, v, g, beta, state, slots, cu):
        out = q.new_zeros(9, H, V)
        out.index_copy_(0, rows(), ops.kda_prefill(q, k, v, g, beta, state, slots, cu))
        return out * 2

    assert run(f, ["kda_prefill_into"]) == "k3.kda_prefill_into writes rows [2, 7) of the buffer itself"


def test_the_call_moves_to_a_buffer_that_is_made_later():
    def f(q, k, v, g, beta, state, slots, cu):
        o = ops.kda_prefill(q, k, v, g, beta, state, slots, cu)
        return (q.new_ones(9, H, V) + beta.sum()).index_copy(0, rows(), o) * 2

    assert run(f, ["kda_prefill_into"]).startswith("k3.kda_prefill_into writes")


@pytest.mark.parametrize(
    "make",
    [
        lambda q: q.new_empty(2 * T, H, V),
        lambda q: torch.empty(2 * T, H, V),
        lambda q: torch.empty_strided((2 * T, H, V), (H * V, V, 1)),
    ],
)
def test_an_empty_buffer_is_made_earlier_where_the_call_cannot_move_past_a_reader_of_its_state(make):
    def f(q, k, v, g, beta, state, slots, cu):
        first = ops.kda_prefill(q, k, v, g, beta, state, slots, cu)
        second = ops.kda_prefill(q, k, v, g, beta, state, slots, cu)
        out = make(q)
        out.index_copy_(0, rows(0), first)
        out.index_copy_(0, rows(T), second)
        return out * 2

    compiled = check(f, args())
    assert [r.detail.split(" of ")[0] for r in compiled.remarks()] == [
        f"k3.kda_prefill_into writes rows {found}" for found in ("[0, 5)", "[5, 10)")
    ]


def test_a_buffer_with_contents_stays_where_it_is():
    def f(q, k, v, g, beta, state, slots, cu):
        first = ops.kda_prefill(q, k, v, g, beta, state, slots, cu)
        second = ops.kda_prefill(q, k, v, g, beta, state, slots, cu)
        return (second.sum() * q.new_ones(9, H, V)).index_copy(0, rows(), first) * 2

    (remark,) = check(f, args()).remarks()
    assert remark.detail == "slice_scatter (another result of the op is needed before the buffer exists)"


def test_an_op_that_exports_writes_the_buffer_and_its_checkpoints():
    def f(q, k, v, g, beta, state, slots, cu):
        out = q.new_zeros(9, H, V)
        offset, slot = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([3, 0], dtype=torch.int32)
        o = ops.kda_prefill_export(q, k, v, g, beta, state, slots, cu, offset, slot)
        return out.index_copy_(0, rows(), o) * 2

    assert run(f, ["kda_prefill_export_into"]).startswith("k3.kda_prefill_export_into writes rows")


def other_user(q, k, v, g, beta, state, slots, cu):
    o = ops.kda_prefill(q, k, v, g, beta, state, slots, cu)
    return q.new_zeros(9, H, V).index_copy(0, rows(), o) * 2, o + 1


def buffer_read(q, k, v, g, beta, state, slots, cu):
    out = q.new_zeros(9, H, V)
    o = ops.kda_prefill(q, k, v, g, beta, state, slots, cu)
    return out.index_copy(0, rows(), o) * 2, out + 1


def another_dtype(q, k, v, g, beta, state, slots, cu):
    o = ops.kda_prefill(q, k, v, g, beta, state, slots, cu).double()
    return q.new_zeros(9, H, V).double().index_copy(0, rows(), o) * 2


def other_dimension(q, k, v, g, beta, state, slots, cu):
    o = ops.kda_prefill(q, k, v, g, beta, state, slots, cu)
    return q.new_zeros(T, 9, V).index_copy(1, torch.arange(3, 5), o) * 2


def result_needed_early(q, k, v, g, beta, state, slots, cu):
    o = ops.kda_prefill(q, k, v, g, beta, state, slots, cu)
    out = q.new_zeros(9, H, V) + state.sum()
    return out.index_copy(0, rows(), o) * 2


def view_of_a_buffer(q, k, v, g, beta, state, slots, cu):
    o = ops.kda_prefill(q, k, v, g, beta, state, slots, cu)
    whole = q.new_zeros(9, H, V)
    return whole[1:].index_copy(0, rows(1), o) * 2


def no_twin(q, k, v, g, beta, state, slots, cu):
    ops.kda_prefill(q, k, v, g, beta, state, slots, cu)
    return q.new_zeros(9, H, K).index_copy(0, rows(), ops.l2_norm(q, 1.0)) * 2


def no_op(q, k, v, g, beta, state, slots, cu):
    ops.kda_prefill(q, k, v, g, beta, state, slots, cu)
    return q.new_zeros(9, H, K).index_copy(0, rows(), q) * 2


REFUSED = {
    other_user: "the op's result has another user",
    buffer_read: "the buffer has another user",
    another_dtype: "the op has no form that writes into a buffer",
    other_dimension: "rows are not the first dimension",
    result_needed_early: "another result of the op is needed before the buffer exists",
    view_of_a_buffer: "the buffer is not a fresh tensor",
    no_twin: "the op has no form that writes into a buffer",
    no_op: "the source is not the result of an op",
}


@pytest.mark.parametrize(("fn", "reason"), REFUSED.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_otherwise_rows_are_copied_and_the_report_says_why(fn, reason):
    assert run(fn, ["kda_prefill"]) == f"slice_scatter ({reason})"


def test_without_fuel_the_scatter_stays():
    def f(q, k, v, g, beta, state, slots, cu):
        out = q.new_zeros(9, H, V)
        return out.index_copy(0, rows(), ops.kda_prefill(q, k, v, g, beta, state, slots, cu)) * 2

    compiled = check(f, args(), fuel=Fuel(0))
    assert compiled.missed() == ["stopped by fuel or by the bisector"]
    assert "aten.index_copy.default" in compiled.targets()


def test_an_input_is_never_the_destination():
    def f(q, k, v, g, beta, state, slots, cu, out):
        out.index_copy_(0, rows(), ops.kda_prefill(q, k, v, g, beta, state, slots, cu))
        return q + 1

    compiled = check(f, [*args(), torch.rand(9, H, V)])
    (remark,) = compiled.remarks()
    assert remark.detail == "slice_scatter (the buffer is not a fresh tensor)"


def test_the_strides_of_eager_mode_go_with_the_call():
    def f(q, k, v, g, beta, state, slots, cu):
        out = q.new_zeros(9, H, V)
        return out.index_copy(0, rows(), ops.kda_prefill(q, k, v, g, beta, state, slots, cu)) * 2

    compiled = Compiled(f)
    compiled(*args())
    (call,) = (n for n in compiled.graphs[0].graph.nodes if n.target in AUTO_FUNCTIONALIZED)
    (op,), eager = call.meta["eager_input_vals"]
    assert op is call.args[0]
    assert eager.keys() == call.kwargs.keys()
    assert [b.shape for b in eager["_all_bases"]] == [(4, H, V, K), (9, H, V)]
    assert eager["q"].stride() == (H * K, K, 1)


def test_a_twin_takes_what_the_op_takes_and_the_buffer_and_the_row():
    for name in ("kda_prefill", "kda_verify", "kda_verify_states", "kda_prefill_export"):
        assert twin_of(getattr(ops, name).default) is getattr(ops, f"{name}_into").default
    assert twin_of(ops.l2_norm.default) is None
    assert twin_of(torch.ops.aten.add.Tensor) is None
    assert twin_of(ops.kda_commit.default) is None
