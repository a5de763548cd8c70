"""The window after every row of drafts, in a slot of its own: exactly the rows, whatever the length."""

import k3compile.kernels  # noqa: F401  registers the ops
import pytest
import torch
from k3compile.kernels.samples import gapped, row_bounds

k3 = torch.ops.k3
SLOTS, CHANNELS = 25, 6


def inputs(lengths, dtype=torch.float64):
    source = torch.Generator().manual_seed(0)
    shapes = (sum(lengths), CHANNELS), (CHANNELS, 4), (SLOTS, 3, CHANNELS)
    x, weight, window = (torch.randn(s, generator=source, dtype=torch.float64).to(dtype) for s in shapes)
    slots = torch.arange(1, len(lengths) + 1)
    scratch = torch.arange(5 * len(lengths)).view(-1, 5) + 5
    scratch[:, 0] = slots  # its own
    return x, weight, window, slots, row_bounds(lengths), scratch


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["meaning", "opened"])
def test_each_target_holds_the_last_three_raw_rows_and_nothing_else_is_written(form, dtype):
    lengths = [4, 0, 1, 2]
    x, weight, window, slots, cu, scratch = inputs(lengths, dtype)
    before = window.clone()
    op = k3.short_conv_verify_states if form == "meaning" else open_form()
    y = op(x, weight, window, slots, cu, scratch)
    torch.testing.assert_close(y, k3.short_conv(x, weight, before.clone(), slots, cu))
    written = set()
    for r, n in enumerate(lengths):
        strip = torch.cat([before[slots[r]], x[cu[r] : cu[r + 1]]])
        for i in range(n):
            assert torch.equal(window[scratch[r, i]], strip[i + 1 : i + 4])
        written |= set(scratch[r, :n].tolist())
    others = [s for s in range(SLOTS) if s not in written]
    assert torch.equal(window[others], before[others])


def open_form():
    from k3compile.kernels import OPS

    return OPS["short_conv_verify_states"].open_form


def test_gaps_stay_and_rows_past_the_last_bound_are_not_read():
    x, weight, window, slots, cu, scratch = inputs([3, 2])
    pool = gapped(window)
    k3.short_conv_verify_states(x, weight, window, slots, cu, scratch)
    tailed = torch.cat([x, torch.full((3, CHANNELS), torch.nan, dtype=torch.float64)])
    y = k3.short_conv_verify_states(tailed, weight, pool, slots, cu, scratch)
    assert torch.equal(pool, window)
    assert (pool._base[:, 1] == 0).all()
    assert (y[5:] == 0).all()


def test_too_long_a_row_and_targets_that_meet_are_refused_before_anything_is_written():
    x, weight, window, slots, cu, scratch = inputs([6])
    with pytest.raises(ValueError, match="6 tokens, scratch has slots for 5"):
        k3.short_conv_verify_states(x, weight, window, slots, cu, scratch)
    x, weight, window, slots, cu, scratch = inputs([2, 2])
    scratch[0, 1], before = 2, window.clone()
    with pytest.raises(ValueError, match="a state needs a slot of its own"):
        k3.short_conv_verify_states(x, weight, window, slots, cu, scratch)
    assert torch.equal(window, before)
