"""A layer, and the whole model, as standard ONNX: the reference evaluator computes what ours computes."""

from __future__ import annotations

import onnx
import pytest
import torch
from onnx_layers import case, close, eager_layer, run_onnx, state_after
from small_models import SMALL, SMALL_LINEAR, make_step, small_model

from k3compile.semantic import layer_to_onnx, model_to_onnx

pytestmark = pytest.mark.oracle
KINDS = {"dense and snapshot": 0, "moe": 1, "mla": 3, "moe and snapshot": 12}


@pytest.fixture(scope="module")
def model():
    return small_model(SMALL, torch.float32)


@pytest.fixture(scope="module")
def linear():
    return small_model(SMALL_LINEAR, torch.float32)


def compare(model, index: int, sequences: int, tokens: int, seen: int) -> None:
    made = case(model, sequences, tokens, seen)
    width = model.config.hidden_size
    p, count = torch.randn(sequences, tokens, width), 2
    blocks = torch.randn(count, sequences, tokens, width)
    if model.layers[index].snapshot:
        blocks[-1] = p
    graph = layer_to_onnx(model, index)
    got = run_onnx(graph, made.feeds | {"p": p.numpy(), "blocks": blocks.numpy()})
    close(got.pop("p_out"), eager_layer(model, made, index, p, blocks))
    want = state_after(made, index)
    assert got.keys() == want.keys()
    for name, value in want.items():
        close(got[name], value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("sequences", "tokens", "seen"), [(2, 7, 5), (1, 1, 0), (1, 70, 3)])
def test_every_kind_of_k3_layer_agrees_with_its_state(model, kind, sequences, tokens, seen):
    compare(model, KINDS[kind], sequences, tokens, seen)


@pytest.mark.parametrize("index", [0, 1, 3])
def test_every_kind_of_kimi_linear_layer_agrees(linear, index):
    compare(linear, index, 2, 6, 4)


@pytest.mark.parametrize("which", ["model", "linear"])
def test_the_whole_model_agrees_to_the_logits(request, which):
    model = request.getfixturevalue(which)
    made = case(model, 2, 5, 3)
    got = run_onnx(model_to_onnx(model), made.feeds | {"tokens": made.ids.numpy()})
    hidden, _ = model(make_step(made.rows), made.pools)
    close(got.pop("logits"), model.logits(hidden).view(2, 5, -1))
    want = {k: v for i in range(model.config.num_hidden_layers) for k, v in state_after(made, i).items()}
    assert got.keys() == want.keys()
    for name, value in want.items():
        close(got[name], value)


def test_only_standard_operators_are_used(model):
    graph = model_to_onnx(model)
    assert {(o.domain, o.version) for o in graph.opset_import} == {("", 27)}
    assert {n.domain for n in graph.graph.node} == {""}
    kinds = [n.op_type for n in graph.graph.node]
    assert kinds.count("LinearAttention") == kinds.count("CausalConvWithState") == 10
    assert kinds.count("DequantizeLinear") == 13 * 3
    assert {d.dim_param for i in graph.graph.input for d in i.type.tensor_type.shape.dim} >= {"B", "T", "S"}


def test_experts_stay_in_four_bits(model):
    graph = layer_to_onnx(model, 1)
    held = {t.name: t for t in graph.graph.initializer}
    w1 = held["layers.1.ffn.experts.w1"]
    assert (w1.data_type, list(w1.dims)) == (onnx.TensorProto.FLOAT4E2M1, [8, 32, 64])
    assert w1.raw_data == model.layers[1].ffn.experts.w1.numpy().tobytes()
    scale = held["layers.1.ffn.experts.w1_scale"]
    assert (scale.data_type, list(scale.dims)) == (onnx.TensorProto.FLOAT8E8M0, [8, 32, 2])


def test_a_layer_that_is_not_there_and_a_checkpoint_of_mla_are_refused(model):
    with pytest.raises(ValueError, match=r"layer 14 does not exist: layers are 0 \.\. 13"):
        layer_to_onnx(model, 14)
    with pytest.raises(ValueError, match="layer 3 is MLA and has no state to cut: choose a KDA layer, as 0"):
        layer_to_onnx(model, 3, checkpoint=True)
