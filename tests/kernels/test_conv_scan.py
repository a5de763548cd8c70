"""The batch form of the short convolution against torch's conv1d over the whole strip."""

import k3compile.kernels  # noqa: F401  registers the ops
import pytest
import torch
from k3compile.kernels.samples import Draw
from torch.nn import functional as F

k3 = torch.ops.k3


def drawn(count, tokens, channels=10, dtype=torch.float64):
    draw = Draw(dtype)
    return draw.normal(count, tokens, channels), draw.normal_acc(channels, 4), draw.normal(count, 3, channels)


def want(x, weight, initial):
    strip = torch.cat([initial, x], 1)
    y = F.silu(F.conv1d(strip.mT, weight.unsqueeze(1), groups=len(weight))).mT
    return y, strip[:, -3:]


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 63, 64, 65, 200])
def test_it_equals_a_convolution_of_window_and_sequence(tokens):
    args = drawn(3, tokens)
    y, window = k3.conv_scan(*args)
    right, last = want(*args)
    torch.testing.assert_close(y, right, rtol=1e-12, atol=1e-12)
    assert torch.equal(window, last)


def test_no_tokens_hand_the_window_back():
    args = drawn(2, 0)
    y, window = k3.conv_scan(*args)
    assert y.shape == (2, 0, 10)
    assert torch.equal(window, args[2])


def test_the_window_keeps_its_own_dtype():
    x, weight, initial = drawn(2, 5, dtype=torch.bfloat16)
    assert k3.conv_scan(x, weight, initial.float())[1].dtype == torch.float32


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_exports_are_the_windows_of_shorter_runs(tokens):
    x, weight, initial = drawn(2, 9)
    pool = torch.full((3, 3, 3, 10), torch.nan, dtype=torch.float64)
    places = torch.tensor([tokens, 0, 0], dtype=torch.int32)
    got = k3.conv_scan_export(x, weight, initial, places, pool, 2)
    assert all(torch.equal(a, b) for a, b in zip(got, k3.conv_scan(x, weight, initial)))
    assert torch.equal(pool[2, 0], k3.conv_scan(x[:, :tokens], weight, initial)[1][0])
    assert torch.isnan(pool[:2]).all()
    assert torch.isnan(pool[2, 1:]).all()


def test_an_offset_past_the_sequence_is_refused():
    args = drawn(1, 4)
    with pytest.raises(ValueError, match="export_offset of row 0 is 5; the row has 4 tokens"):
        k3.conv_scan_export(*args, torch.tensor([5], dtype=torch.int32), torch.zeros(1, 1, 3, 10), 0)
