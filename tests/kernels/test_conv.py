"""The short convolution against torch's conv1d and ONNX's CausalConvWithState, over ragged rows."""

import itertools

import k3compile.kernels  # noqa: F401  registers the ops
import numpy as np
import pytest
import torch
from k3compile.kernels.samples import gapped, row_bounds
from kda_oracle import worst
from torch.nn import functional as F

k3 = torch.ops.k3
SLOTS, CHANNELS = 9, 6


def inputs(lengths, dtype=torch.float64, seed=0):
    source = torch.Generator().manual_seed(seed)
    shapes = (sum(lengths), CHANNELS), (CHANNELS, 4), (SLOTS, 3, CHANNELS)
    x, weight, window = (torch.randn(s, generator=source, dtype=torch.float64).to(dtype) for s in shapes)
    slots = torch.randperm(SLOTS - 1, generator=source)[: len(lengths)] + 1
    return x, weight, window, slots, row_bounds(lengths)


def one_row(x, weight, window):
    strip = torch.cat([window, x])
    y = F.conv1d(strip.T[None], weight[:, None], groups=CHANNELS)[0].T
    return F.silu(y), strip[-3:]


RAGGED = ([1], [1, 1, 1], [2], [3], [4, 0, 1, 2, 70, 3, 130], [0], [0, 0, 5], [64, 64], [1, 2])


@pytest.mark.parametrize("lengths", RAGGED, ids=str)
def test_every_row_is_torchs_conv1d_of_its_window_and_itself(lengths):
    x, weight, window, slots, cu = inputs(lengths)
    before = window.clone()
    y = k3.short_conv(x, weight, window, slots, cu)
    for r, slot in enumerate(slots):
        row = slice(cu[r], cu[r + 1])
        want, kept = one_row(x[row], weight, before[slot]) if lengths[r] else (x[row], before[slot])
        torch.testing.assert_close(y[row], want)
        assert torch.equal(window[slot], kept)
    others = [s for s in range(SLOTS) if s not in slots.tolist()]
    assert torch.equal(window[others], before[others])


@pytest.mark.oracle
def test_onnx_computes_the_same_row_and_the_same_state():
    from onnx import TensorProto, helper
    from onnx.reference import ReferenceEvaluator

    x, weight, window, slots, cu = inputs([11], torch.float32)
    node = helper.make_node(
        "CausalConvWithState", ["x", "w", "", "past"], ["y", "present"], activation="silu"
    )
    info = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("x", "w", "past", "y", "present")
    ]
    graph = helper.make_graph([node], "conv", info[:3], info[3:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 27)])
    feeds = {"x": x.T[None], "w": weight[:, None], "past": window[slots[0]].T[None]}
    y, present = ReferenceEvaluator(model).run(None, {n: np.ascontiguousarray(v) for n, v in feeds.items()})
    got = k3.short_conv(x, weight, window, slots, cu)
    torch.testing.assert_close(got, torch.from_numpy(y)[0].T)
    assert torch.equal(window[slots[0]], torch.from_numpy(present)[0].T)


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 9])
def test_a_cut_row_continues_from_its_window(cut):
    x, weight, window, slots, cu = inputs([10])
    whole = k3.short_conv(x, weight, window.clone(), slots, cu)
    first = k3.short_conv(x[:cut], weight, window, slots, torch.tensor([0, cut]))
    second = k3.short_conv(x[cut:], weight, window, slots, torch.tensor([0, 10 - cut]))
    torch.testing.assert_close(torch.cat([first, second]), whole)


def test_verify_records_and_leaves_the_window():
    lengths = [3, 1, 0, 5]
    x, weight, window, slots, cu = inputs(lengths)
    before, records = window.clone(), torch.full((SLOTS, 5, CHANNELS), 7.0, dtype=torch.float64)
    y = k3.short_conv_verify(x, weight, window, slots, cu, records)
    assert torch.equal(window, before)
    assert torch.equal(y, k3.short_conv(x, weight, before, slots, cu))
    for r, slot in enumerate(slots):
        assert torch.equal(records[slot, : lengths[r]], x[cu[r] : cu[r + 1]])
        assert (records[slot, lengths[r] :] == 7.0).all()


def test_a_verify_row_longer_than_the_records_is_refused():
    x, weight, window, slots, cu = inputs([4])
    with pytest.raises(ValueError, match="4 tokens, the records hold 3"):
        k3.short_conv_verify(x, weight, window, slots, cu, window.new_zeros(SLOTS, 3, CHANNELS))


def test_slices_and_gaps_are_as_good_as_dense_and_gaps_stay():
    x, weight, window, slots, cu = inputs([5, 1, 70])
    wide = torch.randn(len(x), 3 * CHANNELS, dtype=torch.float64)
    wide[:, CHANNELS : 2 * CHANNELS] = x
    pool = gapped(window)
    want = k3.short_conv(x, weight, window, slots, cu)
    assert torch.equal(k3.short_conv(wide[:, CHANNELS : 2 * CHANNELS], weight, pool, slots, cu), want)
    assert torch.equal(pool, window)
    assert (pool._base[:, 1] == 0).all()


def test_rows_past_the_last_bound_are_not_read():
    x, weight, window, slots, cu = inputs([5, 2])
    want = k3.short_conv(x, weight, window.clone(), slots, cu)
    tailed = torch.cat([x, torch.full((3, CHANNELS), torch.nan, dtype=torch.float64)])
    got = k3.short_conv(tailed, weight, window, slots, cu)
    assert torch.equal(got[:7], want)
    assert (got[7:] == 0).all()
    assert torch.isfinite(window).all()


def test_the_order_of_rows_changes_nothing():
    lengths = [1, 3, 1, 70]
    x, weight, window, slots, cu = inputs(lengths)
    want, rows = {}, [x[cu[r] : cu[r + 1]] for r in range(4)]
    for order in itertools.permutations(range(4)):
        pool = window.clone()
        bounds = row_bounds([lengths[r] for r in order])
        y = k3.short_conv(torch.cat([rows[r] for r in order]), weight, pool, slots[list(order)], bounds)
        for place, r in enumerate(order):
            mine = y[bounds[place] : bounds[place + 1]], pool[slots[r]]
            assert all(worst(a, b) < 1e-14 for a, b in zip(mine, want.setdefault(r, mine)))
