"""Latent attention in Triton, interpreted: a context in parts, several tokens of a row, poisoned pages."""

import pytest
import torch
from interpreted import check_op, check_samples, meaning_of, outcome_of
from k3compile.kernels.mla import paging
from k3compile.kernels.mla_triton import objection
from k3compile.kernels.samples import Draw
from kda_rows import error_ratios


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_samples_come_out_as_the_meaning_says(dtype):
    check_samples("mla_attend", dtype)


def call(lengths, seen, size=4, pages=120, heads=3, latent=16, rope=4):
    """Arguments with NaN in every row of a page that no context has."""
    draw = Draw(torch.float32, seed=len(lengths))
    table, before, cu = paging(draw, lengths, seen, pages, size)
    pool = torch.full((pages, size, latent + rope), torch.nan)
    for row, n, s in zip(table, lengths, seen):
        for token in range(n + s):
            pool[row[token // size], token % size] = torch.randn(latent + rope)
    q = draw.normal(sum(lengths), heads, 8 + rope)
    return q, draw.normal(heads * 14, latent) * latent**-0.5, pool, table, before, cu, 12**-0.5


@pytest.mark.parametrize(
    ("lengths", "seen"),
    [([1, 1], [200, 0]), ([1], [129]), ([3, 1, 0, 2], [140, 5, 9, 0]), ([5], [0]), ([2, 2], [127, 128])],
    ids=str,
)
def test_no_row_past_a_context_is_read_however_it_is_split(lengths, seen):
    args = call(lengths, seen)
    clean = list(args)
    clean[2] = args[2].nan_to_num()
    (got,), _ = outcome_of("mla_attend", args)
    (want,), _ = meaning_of("mla_attend", tuple(clean))
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("lengths", "seen"), [([1] * 5, [200, 9, 0, 40, 3]), ([2, 3], [90, 5])], ids=str)
def test_what_bfloat16_drops_of_queries_weights_and_sums_is_kept(lengths, seen):
    q, kv_b, pool, *rest = call(lengths, seen)
    rows = (*(x.bfloat16() for x in (q, kv_b, pool.nan_to_num())), *rest)
    assert error_ratios("mla_attend", [rows])[0] <= 1.1


def test_token_rows_of_nobody_are_zero_and_not_read():
    q, *rest = call([2, 1], [7, 3])
    padded = torch.cat([q, torch.full((2, *q.shape[1:]), torch.nan)])
    (got,), _ = outcome_of("mla_attend", (padded, *rest))
    assert torch.equal(got[3:], torch.zeros(2, 3, 6))
    assert torch.isfinite(got).all()


def test_one_key_may_outweigh_the_rest_wherever_its_part_is():
    for token in (0, 70, 150):
        args = call([1], [150])
        page, at = args[3][0, token // 4], token % 4
        args[2][page, at] *= 100.0
        clean = list(args)
        clean[2] = args[2].nan_to_num()
        (got,), _ = outcome_of("mla_attend", args)
        (want,), _ = meaning_of("mla_attend", tuple(clean))
        torch.testing.assert_close(got.double(), want, atol=1e-5 * float(want.abs().max()), rtol=0)


def test_more_heads_than_a_tile_has_at_least():
    check_op("mla_attend", torch.float32, clean(call([1, 3], [9, 2], heads=20)))


def clean(args):
    return (*args[:2], args[2].nan_to_num(), *args[3:])


def test_what_does_not_fit_is_refused(monkeypatch):
    from k3compile.kernels import mla_triton

    args = call([1], [3])
    assert objection(*args) == "cpu tensors"
    monkeypatch.setattr(mla_triton, "no_gpu", lambda *tensors: None)
    assert objection(*args) is None
    assert "pages of torch.bfloat16" in objection(*args[:2], args[2].bfloat16(), *args[3:])
    assert "not in one piece" in objection(args[0], torch.randn(16, 42).t(), *args[2:])
    assert "float64" in objection(args[0].double(), *args[1:])
