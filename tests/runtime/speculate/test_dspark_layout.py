"""The released draft's tensors: how many, how large, and each in one place of our model."""

import json

import pytest
import torch
from draft_reference import DSPARK_JSON, small_draft
from k3compile.runtime.speculate.dspark_config import DSparkConfig
from k3compile.runtime.speculate.dspark_layout import SHARED, entries, num_parameters
from k3compile.runtime.speculate.dspark_model import DSparkModel
from small_models import SMALL

RELEASED = json.loads(DSPARK_JSON.read_text())


def test_the_released_draft_has_its_tensors_and_its_size():
    config = DSparkConfig.from_dict(RELEASED)
    found = {entry.name: entry.shape for entry in entries(config)}
    assert num_parameters(config) == 3_562_312_961
    assert len(found) == 68
    assert all(entry.dtype == torch.bfloat16 for entry in entries(config))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("context_proj.weight", (7168, 35840)),
        ("context_norm.weight", (7168,)),
        ("final_norm.weight", (7168,)),
        ("embed_tokens.weight", (163840, 7168)),
        ("markov_head.markov_w1.weight", (163840, 256)),
        ("markov_head.markov_w2.weight", (163840, 256)),
        ("confidence_head.proj.weight", (1, 7424)),
        ("confidence_head.proj.bias", (1,)),
        ("layers.4.input_layernorm.weight", (7168,)),
        ("layers.0.post_attention_layernorm.weight", (7168,)),
        ("layers.1.mlp.gate_proj.weight", (14336, 7168)),
        ("layers.1.mlp.up_proj.weight", (14336, 7168)),
        ("layers.1.mlp.down_proj.weight", (7168, 14336)),
        ("layers.2.self_attn.q_a_proj.weight", (1536, 7168)),
        ("layers.2.self_attn.q_a_layernorm.weight", (1536,)),
        ("layers.2.self_attn.q_b_proj.weight", (12288, 1536)),
        ("layers.2.self_attn.kv_a_proj_with_mqa.weight", (576, 7168)),
        ("layers.2.self_attn.kv_a_layernorm.weight", (512,)),
        ("layers.2.self_attn.kv_b_proj.weight", (16384, 512)),
        ("layers.2.self_attn.o_proj.weight", (7168, 8192)),
    ],
)
def test_a_tensor_has_its_shape(name, shape):
    assert {e.name: e.shape for e in entries(DSparkConfig.from_dict(RELEASED))}[name] == shape


def test_every_parameter_is_filled_exactly_once():
    model = small_draft(SMALL)
    parameters = dict(model.named_parameters())
    sizes = dict.fromkeys(parameters, 0)
    for entry in entries(model.config):
        if entry.name == SHARED:
            assert entry.parameter == ""
            continue
        part = parameters[entry.parameter]
        part = part if entry.index is None else part[entry.index]
        assert part.numel() == torch.Size(entry.shape).numel(), entry.name
        sizes[entry.parameter] += part.numel()
    assert sizes == {name: parameter.numel() for name, parameter in parameters.items()}


def test_the_released_draft_without_its_copy_of_the_embedding_is_what_a_model_holds():
    model = DSparkModel(DSparkConfig.from_dict(RELEASED), torch.bfloat16, "meta")
    assert sum(p.numel() for p in model.parameters()) == 3_562_312_961 - 163840 * 7168
    assert sum(p.pages[0].numel() for p in model.make_pools(2, 1)) * 2 == 5760  # bytes a token
