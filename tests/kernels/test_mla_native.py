"""Latent attention in C++, the op: each row the way that costs less, and what the meaning gives."""

import pytest
import torch
from compiled import Compiled
from k3compile.kernels import mla_few_native, mla_native
from k3compile.kernels.mla import mla_attend
from k3compile.kernels.mla_few_native import attend_few
from k3compile.kernels.mla_prefill_native import attend_many
from k3compile.kernels.native import build
from k3compile.passes.lower import Lower
from latent_calls import SEEN, WIDTHS, call, in_float64


@pytest.fixture(autouse=True)
def there_is_a_kernel():
    if reason := mla_native.objection(*call()):
        pytest.skip(reason)


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [[], [0], [1], [3, 40, 0, 1, 200]], ids=str)
def test_it_agrees_with_its_meaning_for_rows_of_any_length(lengths, kept):
    args = call(lengths, SEEN[: len(lengths)])
    args[0] = torch.cat([args[0], torch.full((3, *args[0].shape[1:]), torch.nan)])
    args[1] = args[1].to(kept)
    got = mla_native.attend_native(*args)
    torch.testing.assert_close(got, mla_attend.meaning(*args), rtol=1e-5, atol=1e-6)
    assert (got[-3:] == 0).all()


def test_rows_of_both_ways_in_one_batch_are_what_they_are_alone():
    lengths, seen = [1, 300, 20, 200], [500, 20, 900, 0]
    args = call(lengths, seen, WIDTHS[0], size=16)
    got = mla_native.attend_native(*args)
    for attend, does in ((attend_few, [True, False, True, False]), (attend_many, [False, True, False, True])):
        attend(*args, out := torch.full_like(got, 7.0), divided=True)
        for part, want, done in zip(out.split(lengths), got.split(lengths), does):
            assert torch.equal(part, want if done else torch.full_like(want, 7.0))
    want = mla_attend.meaning(*in_float64(args))
    error = (got - want).norm(), (mla_attend.meaning(*args) - want).norm()
    assert error[0] <= 1.1 * error[1]
    for r in range(4):
        part = slice(args[5][r], args[5][r + 1])
        bounds = torch.tensor([0, lengths[r]])
        alone = mla_native.attend_native(
            args[0][part], *args[1:3], args[3][r : r + 1], args[4][r : r + 1], bounds, args[6]
        )
        assert torch.equal(alone, got[part])


def test_it_objects_to_what_its_kernels_cannot_do(monkeypatch):
    args, said = call(), mla_native.objection
    assert said(*args) is None
    assert said(args[0], args[1].bfloat16(), *args[2:]) is None
    assert said(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in args)) == "meta tensors"
    assert said(args[0].double(), *args[1:]) == "some arguments are torch.float64, not float32"
    assert said(*call(widths=(2, 4, 4, 4, 24))) == "latents of 24 channels, not a multiple of 16"
    monkeypatch.setattr(mla_native.mla_prefill_native, "cannot", lambda: "no native mla_prefill kernel: x")
    assert said(*args) == "no native mla_prefill kernel: x"
    monkeypatch.setattr(mla_few_native, "best_isa", lambda: "portable")
    assert said(*args) == "vectors of four lanes gain nothing"


def test_cached_code_runs_where_nothing_can_be_compiled(monkeypatch):
    monkeypatch.setattr(build, "_LOADED", {})
    monkeypatch.setattr(build, "compilers", list)
    build.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="the reference computes it"):
        got = torch.ops.k3.mla_attend.native(*call())
    assert torch.equal(got, mla_attend.meaning(*call()))


def test_it_is_chosen_and_a_report_says_so():
    args = call()
    compiled = Compiled(lambda *a: mla_attend.overload(*a), (Lower(),))
    got = compiled(*args)
    (remark,) = compiled.remarks(name="lower")
    assert remark.reason == "computed by native, C++ that was compiled here"
    torch.testing.assert_close(got, mla_attend.meaning(*args), rtol=1e-5, atol=1e-6)


def test_where_it_is_not_chosen_a_report_says_why():
    args = call(widths=(2, 4, 4, 4, 24))
    compiled = Compiled(lambda *a: mla_attend.overload(*a), (Lower(),))
    compiled(*args)
    (remark,) = compiled.remarks(name="lower")
    assert remark.reason == "computed by its meaning"
    assert "native: latents of 24 channels, not a multiple of 16" in remark.detail
