"""The feed-forwards alone: routing with ties, masked experts, and both activations."""

import numpy as np
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from onnx_layers import close
from small_models import SMALL, SMALL_LINEAR, small_model

from k3compile.semantic.builder import Builder
from k3compile.semantic.moe import mlp, moe, route

pytestmark = pytest.mark.oracle


def evaluate(write, layer, x: torch.Tensor) -> torch.Tensor:
    build = Builder()
    build.input("x", "B", "T", x.shape[-1])
    build.output("y", write(build, layer, "x"), "B", "T", "F")
    (got,) = ReferenceEvaluator(build.model("m")).run(None, {"x": x.numpy()})
    return torch.from_numpy(np.array(got))


@pytest.mark.parametrize("config", [SMALL, SMALL_LINEAR], ids=["mxfp4 in a latent", "dense"])
def test_the_moe_block_agrees_on_every_token(config):
    layer = small_model(config, torch.float32).layers[1].ffn
    x = torch.randn(3, 5, config.hidden_size)
    close(evaluate(moe, layer, x), layer(x.flatten(0, 1)).view(x.shape))


@pytest.mark.parametrize("config", [SMALL, SMALL_LINEAR], ids=["capped", "silu"])
def test_the_dense_mlp_agrees(config):
    layer = small_model(config, torch.float32).layers[0].ffn
    x = torch.randn(1, 4, config.hidden_size) * 20
    close(evaluate(mlp, layer, x), layer(x[0]).view(x.shape))


def test_equal_scores_choose_the_lower_expert_as_ours_do():
    layer = small_model(SMALL, torch.float32).layers[1].ffn
    layer.gate.zero_()
    layer.e_score_correction_bias.zero_()
    x = torch.randn(1, 2, SMALL.hidden_size)
    weights, ids = torch.ops.k3.route(
        x[0], layer.gate, layer.e_score_correction_bias, layer.top_k, layer.scale, layer.renormalize
    )
    want = torch.zeros(2, SMALL.num_experts).scatter(1, ids, weights)
    assert ids.tolist() == [[0, 1], [0, 1]]
    close(evaluate(route, layer, x)[0], want)
