"""The interior checkpoint is two LinearAttention nodes, and equals a run that stops there."""

import numpy as np
import pytest
import torch
from onnx_layers import case, close, run_onnx
from small_models import SMALL, Row, make_step, small_model

from k3compile.semantic import layer_to_onnx

pytestmark = pytest.mark.oracle
INDEX = 1


@pytest.fixture(scope="module")
def model():
    return small_model(SMALL, torch.float32)


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 64])
def test_a_cut_gives_the_state_of_a_shorter_run_and_the_same_outputs(model, cut):
    tokens, width = cut + 4, model.config.hidden_size
    made = case(model, 2, tokens, 0)
    p, blocks = torch.randn(2, tokens, width), torch.randn(1, 2, tokens, width)
    feeds = made.feeds | {"p": p.numpy(), "blocks": blocks.numpy(), "checkpoint_at": np.array([cut])}
    graph = layer_to_onnx(model, INDEX, checkpoint=True)
    assert [n.op_type for n in graph.graph.node].count("LinearAttention") == 2
    split, whole = run_onnx(graph, feeds), run_onnx(layer_to_onnx(model, INDEX), feeds)
    for name, value in whole.items():
        close(split[name], value, 1e-6)

    slots = [r.slot for r in made.rows]
    step = make_step([Row(r.tokens[:cut], r.slot, 0) for r in made.rows])
    pool = made.pools[INDEX]
    short, bank = p[:, :cut].reshape(-1, width), blocks[:, :, :cut].reshape(1, -1, width)
    model.layers[INDEX](short, bank, pool, step)
    close(split["layers.1.checkpoint_state"], pool.state[slots].mT)
    close(split["layers.1.checkpoint_window"], pool.window[slots].mT)


def test_the_state_at_the_cut_resumes_to_the_same_end(model):
    cut, tokens, width = 3, 9, model.config.hidden_size
    made = case(model, 1, tokens, 0)
    p, blocks = torch.randn(1, tokens, width), torch.randn(1, 1, tokens, width)
    feeds = made.feeds | {"p": p.numpy(), "blocks": blocks.numpy(), "checkpoint_at": np.array([cut])}
    first = run_onnx(layer_to_onnx(model, INDEX, checkpoint=True), feeds)
    rest = {
        "p": p[:, cut:].contiguous().numpy(),
        "blocks": blocks[:, :, cut:].contiguous().numpy(),
        "layers.1.state": first["layers.1.checkpoint_state"].numpy(),
        "layers.1.window": first["layers.1.checkpoint_window"].numpy(),
    }
    second = run_onnx(layer_to_onnx(model, INDEX), rest)
    close(second["p_out"], first["p_out"][:, cut:])
    close(second["layers.1.present_state"], first["layers.1.present_state"])
    close(second["layers.1.present_window"], first["layers.1.present_window"])
