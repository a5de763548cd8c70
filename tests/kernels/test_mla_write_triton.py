"""Latents into pages, interpreted: nothing but a row's own place is written."""

import pytest
import torch
from interpreted import check_op, check_samples, outcome_of
from k3compile.kernels.mla import paging
from k3compile.kernels.mla_write_triton import objection
from k3compile.kernels.samples import Draw, gapped


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_samples_come_out_as_the_meaning_says(dtype):
    check_samples("mla_write", dtype)


def call(lengths, seen, width=72, dtype=torch.float32):
    draw = Draw(dtype)
    pages = torch.full((40, 4, width), torch.nan, dtype=dtype)
    return draw.normal(sum(lengths), width), pages, *paging(draw, lengths, seen, 40, 4)


def test_only_the_places_of_this_step_are_written():
    args = call([5, 0, 1, 18], [3, 2, 4, 0])
    _, (pages,) = outcome_of("mla_write", args)
    table, seen = args[2], args[3].tolist()
    expected = {
        (int(table[r, p // 4]), p % 4)
        for r, n in enumerate([5, 0, 1, 18])
        for p in range(seen[r], seen[r] + n)
    }
    found = {(page, at) for page, at in pages.isfinite().all(-1).nonzero().tolist()}
    assert found == expected
    assert pages.isnan().all(-1).sum() == 160 - len(expected)


def test_token_rows_of_nobody_are_written_nowhere():
    latent, *rest = call([2, 1], [7, 3])
    padded = torch.cat([latent, torch.full((30, 72), 7.0)])
    _, (pages,) = outcome_of("mla_write", (padded, *rest))
    assert pages.isfinite().all(-1).sum() == 3
    assert not (pages == 7.0).any()


def test_pages_and_rows_with_gaps_and_another_dtype_are_written_where_they_are():
    latent, _, *rest = call([5, 0, 1, 18], [3, 2, 4, 0])
    wide = torch.full((24, 200), torch.nan)
    wide[:, 64:136] = latent
    args = wide[:, 64:136], gapped(torch.zeros(40, 4, 72, dtype=torch.bfloat16)), *rest
    _, (got,) = outcome_of("mla_write", args)
    _, (plain,) = outcome_of("mla_write", (latent, torch.zeros(40, 4, 72, dtype=torch.bfloat16), *rest))
    assert torch.equal(got, plain)
    check_op("mla_write", torch.float32, (wide[:, 64:136], gapped(torch.zeros(40, 4, 72)), *rest))


def test_what_does_not_fit_is_refused(monkeypatch):
    from k3compile.kernels import mla_write_triton

    args = call([1], [3])
    assert objection(*args) == "cpu tensors"
    monkeypatch.setattr(mla_write_triton, "no_gpu", lambda *tensors: None)
    assert objection(*args) is None
    assert "float64" in objection(args[0].double(), *args[1:])
    assert "16 bytes" in objection(*call([1], [3], width=70))
    assert "side by side" in objection(*args[:2], torch.zeros(3, 2, dtype=torch.int64).t(), *args[3:])
