"""A product with a bfloat16 matrix reads it as it is; what it cannot do it says."""

import k3compile.kernels  # noqa: F401  (registers the ops)
import pytest
import torch
from compiled import Compiled
from k3compile.kernels.native import build
from k3compile.passes.lower import Lower
from k3compile.passes.read_bf16 import READ_BF16
from k3compile.passes.runner import Fuel
from latent_calls import call
from torch.nn import functional as F

X, W = torch.randn(5, 24), torch.randn(7, 24).bfloat16()
OP = "k3.linear_bf16.default"


def linear(x, w):
    return F.linear(x, w.to(x.dtype))


def rewritten(fn, *args, **options):
    compiled = Compiled(fn, (READ_BF16,), **options)
    got = compiled(*args)
    torch.testing.assert_close(got, fn(*args))
    return compiled, compiled.remarks(name="read_bf16")


@pytest.mark.parametrize("decompose", [False, True])
def test_no_float32_copy_of_the_matrix_is_made(decompose):
    compiled, (remark,) = rewritten(linear, X, W, decompose=decompose)
    assert compiled.targets() == [OP]
    assert (remark.kind, remark.reason) == ("applied", "the matrix is read as it is")
    # the copy is neither made (2 bytes read, 4 written) nor read (4), and the op reads 2
    assert remark.expected == {"launches": -1, "bytes": str(-8 * W.numel()), "allocations": -1}
    assert [p.expression for p in remark.proofs] == ["bfloat16 -> float32"]


def test_other_readers_of_the_copy_keep_it():
    def function(x, w):
        wide = w.to(x.dtype)
        return F.linear(x, wide), wide.sum()

    compiled, (remark,) = rewritten(function, X, W)
    assert OP in compiled.targets()
    assert "aten._to_copy.default" in compiled.targets()
    assert remark.expected == {"launches": 0, "bytes": str(-2 * W.numel()), "allocations": 0}


def test_two_products_with_one_copy_need_none():
    def function(x, w):
        wide = w.to(x.dtype)
        return F.linear(x, wide), F.linear(x * 2, wide)

    compiled, remarks = rewritten(function, X, W)
    assert [r.kind for r in remarks] == ["applied", "applied"]
    assert "aten._to_copy.default" not in compiled.targets()


def test_a_product_may_read_another():
    compiled, _ = rewritten(lambda x, w, v: linear(linear(x, w), v), X, W, torch.randn(3, 7).bfloat16())
    assert compiled.targets() == [OP, OP]


def test_rows_of_several_dimensions_and_unknown_number_are_rows():
    compiled, (remark,) = rewritten(linear, torch.randn(2, 3, 24), W)
    assert remark.kind == "applied"
    compiled, (remark,) = rewritten(linear, X, W, unbacked="L['x']:0")
    assert remark.kind == "applied"
    assert OP in compiled.targets()


def test_the_cast_may_come_after_the_transposition():
    compiled, (remark,) = rewritten(lambda x, w: torch.mm(x, w.t().to(x.dtype)), X, W)
    assert remark.kind == "applied"
    assert compiled.targets() == [OP]


@pytest.mark.parametrize(
    ("fn", "args", "reason"),
    [
        (linear, (X.double(), W), "the product runs in torch.float64, not float32"),
        (lambda x, w: torch.addmm(x[:, :7], x, w.float().t()), (X, W), "a bias is added"),
        (
            lambda x, w: x @ w.float(),
            (X, W.t().contiguous()),
            "the outputs are not the rows of the matrix as it is kept",
        ),
        (linear, (X, W.t().contiguous().t()), "the outputs are not the rows of the matrix as it is kept"),
    ],
    ids=["float64", "bias", "columns", "stride"],
)
def test_what_it_leaves_it_says(fn, args, reason):
    compiled, (remark,) = rewritten(fn, *args)
    assert (remark.kind, remark.reason) == ("missed", reason)
    assert OP not in compiled.targets()


def test_on_a_gpu_it_is_left_to_the_compiler():
    from k3compile.passes.read_bf16 import objection, product_at
    from torch._subclasses.fake_tensor import FakeTensorMode

    compiled = Compiled(linear, ())
    compiled(X, W)
    nodes = compiled.graphs[0].graph.nodes
    (found,) = filter(None, map(product_at, nodes))
    with FakeTensorMode(allow_non_fake_inputs=True):
        found.x.meta["val"] = torch.empty(5, 24, device="cuda")
    assert objection(found) == "cuda tensors: the op is for CPUs"


def test_a_float32_matrix_is_no_site():
    _, remarks = rewritten(linear, X, W.float())
    assert remarks == []
    _, remarks = rewritten(lambda x, w: F.linear(x.to(w.dtype), w), X, W)
    assert remarks == []


def test_without_fuel_nothing_is_rewritten():
    compiled, (remark,) = rewritten(linear, X, W, fuel=Fuel(0))
    assert (remark.kind, remark.reason) == ("missed", "stopped by fuel or by the bisector")
    assert OP not in compiled.targets()


def test_without_a_compiler_the_meaning_runs_and_the_report_says_why(monkeypatch):
    monkeypatch.setattr(build, "_LOADED", {})
    monkeypatch.setattr(build, "compilers", list)
    compiled = Compiled(linear, (READ_BF16, Lower(fuses=True)))
    torch.testing.assert_close(compiled(X, W), linear(X, W))
    (remark,) = compiled.remarks(name="lower")
    assert remark.reason == "opened"
    assert "no C++ compiler" in remark.detail


def attention(q, kv_b, pages, table, seen, cu, scale):
    return torch.ops.k3.mla_attend(q, kv_b.to(q.dtype), pages, table, seen, cu, scale)


def attention_args():
    args = call([3, 1], [20, 7])
    args[1] = args[1].bfloat16()
    return args


def test_attention_reads_the_matrix_that_it_widens_itself():
    args = attention_args()
    compiled, (remark,) = rewritten(attention, *args)
    assert compiled.targets() == ["k3.mla_attend.default"]
    assert (remark.kind, remark.reason) == ("applied", "the matrix is read as it is")
    assert remark.expected == {"launches": -1, "bytes": str(-8 * args[1].numel()), "allocations": -1}


def test_attention_of_a_block_of_drafts_too():
    def block(q, kv_b, pages, table, seen, cu, own, scale):
        return torch.ops.k3.mla_attend_block(q, kv_b.to(q.dtype), pages, table, seen, cu, own, scale)

    *args, scale = attention_args()
    compiled, (remark,) = rewritten(block, *args, torch.randn(4, args[2].shape[2]), scale)
    assert compiled.targets() == ["k3.mla_attend_block.default"]
    assert remark.kind == "applied"


def test_attention_to_another_matrix_than_the_one_that_is_kept_stays():
    q, kv_b, *rest = attention_args()
    _, (remark,) = rewritten(lambda q, w, *a: attention(q, w.t(), *a), q, kv_b.t().contiguous(), *rest)
    assert (remark.kind, remark.reason) == ("missed", "the matrix is not only widened")
    _, (remark,) = rewritten(attention, q.double(), kv_b, *rest)
    assert (remark.kind, remark.reason) == ("missed", "the product runs in torch.float64, not float32")


def test_the_native_attention_is_given_the_matrix_as_it_is():
    args = attention_args()
    if reason := build.unavailable("mla") or build.unavailable("mla_prefill"):
        pytest.skip(reason)
    compiled = Compiled(attention, (READ_BF16, Lower()))
    torch.testing.assert_close(compiled(*args), attention(*args), rtol=1e-5, atol=1e-6)
    assert compiled.targets() == ["k3.mla_attend.native"]
