"""The window at any offset is the one a cut row leaves, old rows included, and results do not change."""

import k3compile.kernels  # noqa: F401  registers the ops
import numpy as np
import pytest
import torch
from k3compile.kernels.samples import row_bounds

k3 = torch.ops.k3
LENGTHS = [6, 1, 0, 2, 9]
C, SLOTS = 5, 12


def inputs(lengths=LENGTHS, dtype=torch.float64):
    made = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(shape, generator=made, dtype=torch.float64).to(dtype)

    slots = torch.arange(1, len(lengths) + 1)
    return [normal(sum(lengths), C), normal(C, 4), normal(SLOTS, 3, C), slots, row_bounds(lengths)]


def columns(offsets):
    """Row r exports to slot 6 + r."""
    places = [6 + row if offset else 0 for row, offset in enumerate(offsets)]
    return [torch.tensor([*x, 0], dtype=torch.int32) for x in (offsets, places)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offsets", [[1, 1, 0, 1, 2], [3, 0, 0, 2, 4], [6, 0, 0, 0, 9], [0] * 5], ids=str)
def test_a_window_equals_that_of_a_row_cut_there(offsets, dtype):
    x, weight, window, slots, cu = inputs(dtype=dtype)
    weight, before, plain = (
        weight.to(torch.promote_types(dtype, torch.float32)),
        window.clone(),
        window.clone(),
    )
    got = k3.short_conv_export(x, weight, window, slots, cu, *columns(offsets))
    assert torch.equal(got, k3.short_conv(x, weight, plain, slots, cu))
    for r, offset in enumerate(offsets):
        if offset:
            alone, begin = before.clone(), cu[r].item()
            part = x[begin : begin + offset], weight, alone, slots[r : r + 1], torch.tensor([0, offset])
            k3.short_conv(*part)
            plain[6 + r] = alone[r + 1]
    assert torch.equal(window, plain), "the live windows moved on, the exported ones are there, others stayed"


def test_nothing_to_run_and_no_rows_at_all():
    for lengths in ([], [0, 0]):
        args = inputs(lengths)
        before = args[2].clone()
        assert k3.short_conv_export(*args, *columns([0] * len(lengths))).shape == (0, C)
        assert torch.equal(args[2], before)


def test_a_refused_call_has_written_nothing():
    args = inputs()
    before = args[2].clone()
    for offsets in ([2, 2, 0, 0, 0], [2, -1, 0, 0, 0]):
        with pytest.raises(ValueError, match="export_offset of row 1"):
            k3.short_conv_export(*args, *columns(offsets))
    offset, slot = columns([2, 0, 0, 0, 1])
    slot[4] = 3
    with pytest.raises(ValueError, match="export_slot of row 4 is 3, where row 2"):
        k3.short_conv_export(*args, offset, slot)
    assert torch.equal(args[2], before)


@pytest.mark.oracle
@pytest.mark.parametrize("offset", [1, 2, 3, 7])
def test_onnx_split_at_the_offset_has_the_window_between_its_two_nodes(offset):
    from onnx import TensorProto, helper
    from onnx.reference import ReferenceEvaluator

    x, weight, window, slots, cu = inputs([11], torch.float32)
    names = ("x", "w", "past", "y", "present")
    node = helper.make_node(
        "CausalConvWithState", ["x", "w", "", "past"], ["y", "present"], activation="silu"
    )
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in names]
    graph = helper.make_graph([node], "conv", info[:3], info[3:])
    run = ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 27)])).run

    def onnx(part, past):
        feeds = {"x": part.T[None], "w": weight[:, None], "past": past}
        return run(None, {n: np.ascontiguousarray(v) for n, v in feeds.items()})

    first, between = onnx(x[:offset], window[1].T[None])
    second, end = onnx(x[offset:], between)
    got = k3.short_conv_export(x, weight, window, slots, cu, *columns([offset]))
    assert torch.equal(window[6], torch.from_numpy(between)[0].T)
    assert torch.equal(window[1], torch.from_numpy(end)[0].T)
    torch.testing.assert_close(got, torch.from_numpy(np.concatenate([first, second], 2))[0].T)
