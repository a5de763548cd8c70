"""Products with a bfloat16 matrix in C++: close to float64, and inside their rows."""

import pytest
import torch
from compiled import Compiled
from k3compile.kernels import linear_native
from k3compile.kernels.linear_bf16 import linear_bf16
from k3compile.kernels.native import build
from k3compile.passes.lower import Lower
from lanes import thinned

RANK = list(build.ISAS)
RUNNABLE = RANK[RANK.index(build.best_isa()) :]  # what this CPU can run: its best, and all below
ROWS = 1, 2, 3, 4, 5, 8, 9, 13, 17, 70, 200


@pytest.fixture(params=thinned(RUNNABLE, 1))
def kernel(request):
    if reason := build.unavailable("linear", request.param):
        pytest.skip(reason)
    return linear_native.function(request.param)


def error(got, want):
    """Root mean square of the difference: a largest one is chance where there are few numbers."""
    return ((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt()).item()


@pytest.mark.parametrize("shape", [(24, 40), (64, 128), (67, 1100), (3, 7), (130, 2050)], ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_it_is_at_least_as_close_to_float64_as_the_meaning(kernel, rows, shape):
    x, w = torch.randn(rows, shape[1]) * 3, torch.randn(shape).bfloat16()
    got, want = linear_native.run(x, w, kernel), linear_bf16.meaning(x.double(), w)
    of_meaning = max(error(linear_bf16.meaning(x, w), want), 2.0**-24)  # what rounding a result may cost
    few = 1 + 3 / want.numel() ** 0.5  # the rounding errors of a few numbers scatter by more
    assert error(got, want) <= 1.1 * few * of_meaning


@pytest.mark.parametrize("rows", ROWS)
def test_every_element_is_read_once_and_in_its_place(kernel, rows):
    columns = 1100
    x = torch.zeros(rows, columns)
    x[torch.arange(rows), torch.arange(rows) * 37 % columns] = 1.0
    w = torch.arange(67 * columns).remainder(251).view(67, columns).bfloat16()
    assert torch.equal(linear_native.run(x, w, kernel), w.t()[torch.arange(rows) * 37 % columns].float())


@pytest.mark.parametrize("rows", ROWS)
def test_nothing_beside_the_arguments_is_read(kernel, rows):
    x, w = torch.randn(rows, 70), torch.randn(67, 70).bfloat16()
    want = linear_native.run(x, w, kernel)
    wide, high = torch.full((rows, 200), torch.nan), torch.full((67, 90), torch.nan).bfloat16()
    wide[:, 65:135], high[:, 9:79] = x, w
    assert torch.equal(linear_native.run(wide[:, 65:135], high[:, 9:79], kernel), want)
    assert torch.equal(linear_native.run(x.t().contiguous().t(), w.t().contiguous().t(), kernel), want)


@pytest.mark.parametrize("rows", ROWS)
def test_nothing_beside_the_result_is_written(kernel, rows, monkeypatch):
    x, w = torch.randn(rows, 70), torch.randn(67, 70).bfloat16()
    room = torch.full((rows * 67 + 128,), 77.0)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", lambda t, *shape: room[64:-64].view(shape))
        y = linear_native.run(x, w, kernel)
    assert torch.equal(y, linear_native.run(x, w, kernel))
    assert (room[:64] == 77).all()
    assert (room[-64:] == 77).all()


@pytest.mark.parametrize("rows", [1, 5, 200])
def test_a_row_of_nan_harms_no_other(kernel, rows):
    x, w = torch.randn(rows + 1, 70), torch.randn(67, 70).bfloat16()
    clean = linear_native.run(x, w, kernel)
    x[rows // 2] = torch.nan
    sick = linear_native.run(x, w, kernel)
    assert sick[rows // 2].isnan().all()
    others = torch.arange(rows + 1) != rows // 2
    assert torch.equal(sick[others], clean[others])


@pytest.mark.parametrize("rows", [1, 3, 200])
def test_a_result_does_not_depend_on_how_many_threads_made_it(kernel, rows):
    x, w = torch.randn(rows, 512), torch.randn(600, 512).bfloat16()  # beyond what one thread does alone
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(linear_native.run(x, w, kernel))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_no_rows_and_no_columns(kernel):
    w = torch.randn(5, 16).bfloat16()
    assert linear_native.run(torch.empty(0, 16), w, kernel).shape == (0, 5)
    assert linear_native.run(torch.randn(2, 16), w[:0], kernel).shape == (2, 0)
    assert torch.equal(linear_native.run(torch.empty(2, 0), w[:, :0], kernel), torch.zeros(2, 5))


def test_infinities_and_the_smallest_numbers_are_widened_as_they_are(kernel):
    w = torch.tensor([[float("inf"), 1.0], [2.0**-133, 0.0], [-0.0, 3.3895e38]]).bfloat16()
    for x in (torch.tensor([[1.0, 1.0]]), torch.ones(9, 2)):
        assert torch.equal(linear_native.run(x, w, kernel), x @ w.float().t())


def test_it_objects_to_what_it_cannot_do(monkeypatch):
    x, w = torch.randn(2, 8), torch.randn(3, 8).bfloat16()
    assert linear_native.objection(x.to("meta"), w) == "meta tensors"
    said = "activations are torch.float64 and the matrix is torch.bfloat16, not float32 and bfloat16"
    assert linear_native.objection(x.double(), w) == said
    monkeypatch.setattr(build, "_LOADED", {})
    monkeypatch.setattr(build, "compilers", list)
    assert "no C++ compiler" in linear_native.objection(x, w)


def test_cached_code_runs_where_nothing_can_be_compiled(monkeypatch):
    x, w = torch.randn(2, 8), torch.randn(3, 8).bfloat16()
    monkeypatch.setattr(build, "_LOADED", {})
    monkeypatch.setattr(build, "compilers", list)
    linear_native.kernel_here.cache_clear()
    with pytest.warns(RuntimeWarning, match="no C\\+\\+ compiler.* the reference computes it"):
        got = torch.ops.k3.linear_bf16.native(x, w)
    linear_native.kernel_here.cache_clear()
    assert torch.equal(got, linear_bf16.meaning(x, w))


def test_it_is_chosen_and_a_report_says_so():
    if reason := build.unavailable("linear"):
        pytest.skip(reason)
    x, w = torch.randn(2, 8), torch.randn(3, 8).bfloat16()
    compiled = Compiled(lambda x, w: linear_bf16.overload(x, w), (Lower(fuses=True),))
    torch.testing.assert_close(compiled(x, w), linear_bf16.meaning(x, w))
    assert compiled.targets() == ["k3.linear_bf16.native"]
    (remark,) = compiled.remarks(name="lower")
    assert remark.reason == "computed by native, C++ that was compiled here"
