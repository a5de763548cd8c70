"""Rows into pages in C++: the meaning's bits, and no other place touched."""

import pytest
import torch
from compiled import Compiled
from k3compile.kernels import mla_write_native
from k3compile.kernels.mla import mla_write
from k3compile.kernels.native import build
from k3compile.passes.lower import Lower

native = mla_write.implementations["native"]


def samples(dtype):
    cases = list(mla_write.each_sample(dtype))
    if reason := native.objection(*cases[0]):
        pytest.skip(reason)
    return cases


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_it_has_the_bits_of_the_meaning(dtype):
    for latent, pages, *where in samples(dtype):
        want = pages.clone()
        mla_write.meaning(latent, want, *where)
        native.fn(latent, pages, *where)
        assert torch.equal(pages, want)


def test_rows_and_pages_with_gaps_and_short_indices():
    for latent, pages, table, seen, cu in samples(torch.float32):
        want = pages.clone()
        mla_write.meaning(latent, want, table, seen, cu)
        wide, room = torch.full((len(latent) + 4, 40), torch.nan), torch.full((24, 9, 30), 7.0)
        wide[: len(latent), 9:21], inner = latent, room[:, 2:6, 8:20]
        inner.copy_(pages)
        left = torch.full((len(table) + 1, table.shape[1] + 3), 1 << 40)
        left[: len(table), 1 : 1 + table.shape[1]] = table
        before = room.clone()
        short = (left[: len(table), 1 : 1 + table.shape[1]], seen.to(torch.int32), cu.to(torch.int32))
        native.fn(wide[:, 9:21], inner, *short)  # rows past cu[-1] are not written
        assert torch.equal(inner, want)
        inner.copy_(before[:, 2:6, 8:20])
        assert torch.equal(room, before)


def test_it_objects_to_what_it_cannot_do(monkeypatch):
    latent, pages, *where = next(mla_write.each_sample(torch.float32))
    assert mla_write_native.objection(latent.to("meta"), pages, *where) == "meta tensors"
    said = "rows are torch.float32 and pages torch.bfloat16: rounding is left to torch"
    assert mla_write_native.objection(latent, pages.bfloat16(), *where) == said
    assert "side by side" in mla_write_native.objection(latent, pages.transpose(1, 2), *where)
    monkeypatch.setattr(build, "_LOADED", {})
    monkeypatch.setattr(build, "compilers", list)
    assert "no C++ compiler" in mla_write_native.objection(latent, pages, *where)
    (*_, (latent, pages, *where)) = mla_write.each_sample(torch.float32)
    want = pages.clone()
    mla_write.meaning(latent, want, *where)
    build.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="no C\\+\\+ compiler.* the reference computes it"):
        native.fn(latent, pages, *where)
    assert torch.equal(pages, want)


def test_it_is_chosen_and_a_report_says_so():
    (*_, (latent, pages, *where)) = samples(torch.float32)
    compiled = Compiled(lambda *args: mla_write.overload(*args), (Lower(fuses=True),))
    want = pages.clone()
    mla_write.meaning(latent, want, *where)
    compiled(latent, pages, *where)
    assert torch.equal(pages, want)
    (remark,) = compiled.remarks(name="lower")
    assert remark.reason == "computed by native, C++ that was compiled here"
