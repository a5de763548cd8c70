"""Rows of many queries, interpreted: contexts in stretches, poisoned pages, and as exact as the meaning."""

import pytest
import torch
from interpreted import assert_close, interpreted, meaning_of, outcome_of
from k3compile.kernels import OPS
from k3compile.kernels.mla import absorbed_limit, paging
from k3compile.kernels.mla_prefill_triton import long_rows
from k3compile.kernels.samples import Draw
from lanes import thinned

HEADS, NOPE, ROPE, VALUE, LATENT, SIZE = 2, 16, 8, 12, 32, 16
LONGEST_SHORT = absorbed_limit(LATENT, NOPE + VALUE)


def call(lengths, seen, dtype=torch.float32, seed=0, pages=24):
    """Arguments with NaN in every row of a page that no context has, and in token rows around q's."""
    draw = Draw(dtype, seed=seed)
    table, before, cu = paging(draw, lengths, seen, pages, SIZE)
    pool = torch.full((pages, SIZE, LATENT + ROPE), torch.nan, dtype=dtype)
    for row, n, s in zip(table, lengths, seen):
        for token in range(n + s):
            pool[row[token // SIZE], token % SIZE] = draw.normal(LATENT + ROPE)
    q = torch.full((sum(lengths), HEADS, 48), torch.nan, dtype=dtype)
    q[..., 8 : 8 + NOPE + ROPE] = draw.normal(sum(lengths), HEADS, NOPE + ROPE)
    kv_b = draw.normal(HEADS * (NOPE + VALUE), LATENT) * LATENT**-0.5
    return q[..., 8 : 8 + NOPE + ROPE], kv_b, pool, table, before, cu, (NOPE + ROPE) ** -0.5


def meaning(args):
    clean = [a.nan_to_num() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    return meaning_of("mla_attend", clean)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("lengths", "seen"),
    [
        pytest.param([66], [0], marks=pytest.mark.slow),
        pytest.param([26, 1, 0, 27], [5, 9, 3, 40], marks=pytest.mark.slow),
        ([LONGEST_SHORT, LONGEST_SHORT + 1], [9, 9]),
    ],
    ids=["alone", "among short ones and an empty one", "at the limit"],
)
def test_long_rows_see_their_context_and_no_row_past_it(dtype, lengths, seen):
    args = call(lengths, seen, dtype)
    got, _ = outcome_of("mla_attend", args)
    assert_close("mla_attend", got, meaning(args), dtype)


@pytest.mark.parametrize("dtype", thinned([torch.float32, torch.bfloat16], 1), ids=str)
def test_a_context_longer_than_the_workspace_goes_through_it_in_stretches(dtype):
    args = call([26, 0, 25], [120, 1, 0], dtype)
    (got, after), _ = interpreted("mla_in_stretches", "attend", *args)
    assert after > 1
    assert_close("mla_attend", [got], meaning(args), dtype)


def test_errors_are_no_larger_than_the_meanings_own():
    ours = theirs = 0.0
    for seed in range(3):
        args = call([26], [20], torch.bfloat16, seed)
        (want,) = meaning(args)
        (got,), _ = outcome_of("mla_attend", args)
        own = OPS["mla_attend"].meaning(*args[:2], args[2].nan_to_num(), *args[3:])
        ours += (got.double() - want).square().sum()
        theirs += (own.double() - want).square().sum()
    assert ours.sqrt() <= 1.1 * theirs.sqrt()


def test_how_many_rows_can_be_long_is_known_from_sizes():
    assert long_rows(8184, 24, 170).rows == 24
    assert long_rows(513, 24, 170).rows == 3
    assert long_rows(170, 24, 170).rows == 0
