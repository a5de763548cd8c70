"""What the short convolutions share: one arithmetic whatever the form, and memory that is read as it lies."""

import pytest
import torch
from interpreted import meaning_of, outcome_of
from k3compile.kernels.conv_rows_triton import apart
from k3compile.kernels.samples import Draw, row_bounds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 7, 19])
def test_all_forms_have_the_same_bits(tokens, dtype):
    draw = Draw(dtype)
    x, weight, window = draw.normal(3 * tokens, 40), draw.normal_acc(40, 4), draw.normal(3, 3, 40)
    rows = torch.arange(3), row_bounds([tokens] * 3)
    (y,), (moved,) = outcome_of("short_conv", [x, weight, window, *rows])
    (of_batch, last), _ = outcome_of("conv_scan", [x.view(3, tokens, 40), weight, window])
    assert torch.equal(of_batch.flatten(0, 1), y)
    assert torch.equal(last, moved)
    pool = torch.cat([window, window.new_zeros(3 * tokens, 3, 40)])
    into = torch.arange(3, 3 + 3 * tokens).view(3, tokens)
    (of_drafts,), (left,) = outcome_of("short_conv_verify_states", [x, weight, pool, *rows, into])
    assert torch.equal(of_drafts, y)
    assert torch.equal(left[into[:, -1]], moved)


def test_many_rows_find_their_owner():
    draw, lengths = Draw(torch.float32), [1, 0, 3, 1, 1, 2, 0, 0, 9, 1, 1, 1, 4, 0]
    x, weight, window = draw.normal(24, 20), draw.normal_acc(20, 4), draw.normal(40, 3, 20)
    args = [x, weight, window, draw.choice(len(lengths), 40), row_bounds(lengths)]
    (y,), _ = outcome_of("short_conv", args)
    (want,), _ = meaning_of("short_conv", args)
    torch.testing.assert_close(y.double(), want, atol=1e-5, rtol=0)


def test_what_has_gaps_is_told_by_name():
    whole = torch.zeros(4, 6)
    assert apart(whole=whole, column=torch.arange(3), part=whole[:, 1:4]) is None
    assert apart(rows=whole, cols=whole.t(), more=whole[:, ::2]) == (
        "cols has elements 6 apart along its last dimension, not side by side"
    )
