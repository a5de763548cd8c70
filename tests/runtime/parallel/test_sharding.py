"""Every parameter has one row in the table, the parts make the whole, and what does not divide is refused."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from draft_reference import DSPARK_JSON, small_draft_json
from k3compile.runtime.config import K3Config
from k3compile.runtime.model import Model
from k3compile.runtime.parallel.ranks import Ranks
from k3compile.runtime.parallel.sharding import (
    DRAFT,
    TARGET,
    Replicate,
    Shard,
    check,
    objections,
    part_of,
    split_of,
    units,
)
from k3compile.runtime.speculate.dspark_config import DSparkConfig
from k3compile.runtime.speculate.dspark_model import DSparkModel
from small_models import SMALL, SMALL_LINEAR

RELEASED = K3Config.from_file(Path(__file__).parents[2] / "data" / "kimi-k3-config.json")
RELEASED_DRAFT = DSparkConfig.from_dict(json.loads(DSPARK_JSON.read_text()))
EVEN = dataclasses.replace(SMALL, kda_num_heads=4, num_attention_heads=4, moe_intermediate_size=128)
EVEN_LINEAR = dataclasses.replace(SMALL_LINEAR, kda_num_heads=4, num_attention_heads=4)
TIED = dataclasses.replace(EVEN, tie_word_embeddings=True)
SMALL_DRAFT = DSparkConfig.from_dict(small_draft_json(EVEN, num_attention_heads=4, num_key_value_heads=4))

SCALE = ": 32 inputs of w2 share one MXFP4 scale"


def shapes(model) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def parts_make_the_whole(whole: dict, part: dict, table: dict, n: int) -> None:
    assert list(whole) == list(part)
    for name, full in whole.items():
        split = split_of(table, name)
        want = list(full)
        if isinstance(split, Shard):
            want[split.dim] //= n
        assert list(part[name]) == want, name


@pytest.mark.parametrize(
    ("config", "n"),
    [(EVEN, 2), (EVEN, 4), (EVEN_LINEAR, 4), (TIED, 2), (RELEASED, 8)],
    ids=["k3-2", "k3-4", "linear-4", "tied-2", "released-8"],
)
def test_the_parts_of_a_model_make_the_whole(config, n):
    alone, of_n = (Model(config, device="meta", ranks=Ranks(0, size, "")) for size in (1, n))
    parts_make_the_whole(shapes(alone), shapes(of_n), TARGET, n)


@pytest.mark.parametrize(("config", "n"), [(SMALL_DRAFT, 4), (RELEASED_DRAFT, 8)], ids=["small", "released"])
def test_the_parts_of_a_draft_make_the_whole(config, n):
    alone, of_n = (DSparkModel(config, device="meta", ranks=Ranks(0, size, "")) for size in (1, n))
    parts_make_the_whole(shapes(alone), shapes(of_n), DRAFT, n)


def test_the_tables_name_all_parameters_and_no_others():
    models = [Model(config, device="meta", ranks=Ranks(0, 1, "")) for config in (EVEN, EVEN_LINEAR)]
    draft = DSparkModel(SMALL_DRAFT, device="meta", ranks=Ranks(0, 1, ""))
    assert {starred(name) for model in models for name in shapes(model)} == set(TARGET)
    assert {starred(name) for name in shapes(draft)} == set(DRAFT)


def starred(name: str) -> str:
    parts = name.split(".")
    return ".".join(["layers", "*", *parts[2:]] if parts[0] == "layers" else parts)


# shapes per rank of eight, as the released engine has them
RANK_OF_EIGHT = {
    "embed_tokens": (20480, 7168),
    "lm_head.weight": (20480, 7168),
    "layers.1.self_attn.qkv_proj.weight": (3 * 1536, 7168),
    "layers.1.self_attn.g_proj.weight": (1536, 7168),
    "layers.1.self_attn.f_a_proj.weight": (128, 7168),
    "layers.1.self_attn.b_proj.weight": (12, 7168),
    "layers.1.self_attn.f_b_proj.weight": (1536, 128),
    "layers.1.self_attn.conv_weight": (3 * 1536, 4),
    "layers.1.self_attn.a_log": (12,),
    "layers.1.self_attn.dt_bias": (1536,),
    "layers.1.self_attn.o_norm": (128,),
    "layers.1.self_attn.o_proj.weight": (7168, 1536),
    "layers.3.self_attn.q_proj.0.weight": (1536, 7168),
    "layers.3.self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
    "layers.3.self_attn.g_proj.weight": (1536, 7168),
    "layers.3.self_attn.q_proj.1.weight": (1536,),
    "layers.3.self_attn.kv_a_layernorm.weight": (512,),
    "layers.3.self_attn.q_proj.2.weight": (2304, 1536),
    "layers.3.self_attn.kv_b_proj.weight": (3072, 512),
    "layers.3.self_attn.o_proj.weight": (7168, 1536),
    "layers.1.ffn.gate": (896, 7168),
    "layers.1.ffn.e_score_correction_bias": (896,),
    "layers.1.ffn.routed_expert_down_proj.weight": (3584, 7168),
    "layers.1.ffn.routed_expert_up_proj.weight": (7168, 3584),
    "layers.1.ffn.routed_expert_norm.weight": (3584,),
    "layers.1.ffn.experts.w1": (896, 384, 3584 // 2),
    "layers.1.ffn.experts.w3_scale": (896, 384, 3584 // 32),
    "layers.1.ffn.experts.w2": (896, 3584, 384 // 2),
    "layers.1.ffn.experts.w2_scale": (896, 3584, 384 // 32),
    "layers.1.ffn.shared_experts.gate_proj.weight": (768, 7168),
    "layers.1.ffn.shared_experts.down_proj.weight": (7168, 768),
    "layers.0.ffn.up_proj.weight": (4224, 7168),
    "layers.0.ffn.down_proj.weight": (7168, 4224),
}


def test_a_rank_of_eight_has_the_released_shapes():
    model = Model(RELEASED, torch.bfloat16, "meta", ranks=Ranks(5, 8, ""))
    found = shapes(model)
    assert {name: found[name] for name in RANK_OF_EIGHT} == RANK_OF_EIGHT


def test_pools_are_of_the_heads_of_a_rank_and_of_the_tokens_of_a_context_rank():
    model = Model(EVEN, device="meta", ranks=Ranks(1, 4, "", 2, ""))
    kda, mla = (model.make_pools(5, 7, 16, max_drafts=2)[i] for i in (0, 3))
    assert kda.state.shape == (5, 1, 8, 8)
    assert kda.window.shape == (5, 3, 3 * 8)
    assert kda.rec_u.shape == (5, 3, 1, 8)
    assert kda.rec_x.shape == (5, 3, 3 * 8)
    assert mla.pages.shape == (7, 8, EVEN.kv_lora_rank + EVEN.qk_rope_head_dim)


def test_a_part_of_blocks_holds_the_same_run_of_each_block():
    full = torch.arange(12).view(12, 1)  # q 0..3, k 4..7, v 8..11
    parts = [part_of(full, Shard(0, "head", blocks=3), Ranks(r, 2, "")).flatten().tolist() for r in (0, 1)]
    assert parts == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
    assert part_of(full, Replicate(), Ranks(1, 2, "")) is full


def test_every_unit_of_the_table_is_looked_at():
    wanted = {split.unit for split in TARGET.values() if isinstance(split, Shard)}
    assert wanted == {one.unit for one in units(EVEN)}


def test_the_released_model_and_draft_are_shared_by_eight_and_sixteen():
    assert objections(RELEASED, 8, 8, 128, RELEASED_DRAFT) == []
    assert objections(RELEASED, 16, 2, 128, RELEASED_DRAFT) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_attention_heads": 6}, "num_attention_heads is 6, and 4 ranks need a multiple of 4"),
        ({"kda_num_heads": 2}, "kda_num_heads is 2, and 4 ranks need a multiple of 4"),
        ({"vocab_size": 97}, "vocab_size is 97, and 4 ranks need a multiple of 4"),
        ({"intermediate_size": 50}, "intermediate_size is 50, and 4 ranks need a multiple of 4"),
        (
            {"moe_intermediate_size": 64, "experts_packed": True},
            "moe_intermediate_size is 64, and 4 ranks need a multiple of 128" + SCALE,
        ),
    ],
)
def test_what_does_not_divide_is_refused_alone(change, reason):
    assert objections(dataclasses.replace(EVEN, **change), 4) == [reason]


def test_dense_experts_need_no_whole_groups_and_shared_columns_count_together():
    config = dataclasses.replace(EVEN_LINEAR, moe_intermediate_size=36, num_shared_experts=2)
    assert objections(config, 4) == []
    assert objections(dataclasses.replace(config, moe_intermediate_size=34), 4) == [
        "moe_intermediate_size is 34, and 4 ranks need a multiple of 4"
    ]
    assert objections(dataclasses.replace(config, moe_intermediate_size=33), 4)[1] == (
        "num_shared_experts * moe_intermediate_size is 66, and 4 ranks need a multiple of 4"
    )


def test_context_groups_and_pages_must_divide():
    assert objections(EVEN, 4, 3) == ["dcp is 3, and must divide tp 4: 1, 2, 4"]
    assert objections(EVEN, 4, 4, 18) == ["page_size is 18, and must be a multiple of dcp 4"]
    assert objections(EVEN, 0) == ["tp is 0 and dcp is 1: both must be at least 1"]


def test_a_draft_must_divide():
    draft = dataclasses.replace(SMALL_DRAFT, num_attention_heads=3, intermediate_size=42)
    assert objections(EVEN, 4, draft=draft) == [
        "the draft's num_attention_heads is 3, and 4 ranks need a multiple of 4",
        "the draft's intermediate_size is 42, and 4 ranks need a multiple of 4",
    ]
    with pytest.raises(ValueError, match="the draft's num_attention_heads is 3"):
        DSparkModel(draft, device="meta", ranks=Ranks(0, 4, ""))


def test_all_reasons_come_at_once_with_the_numbers_that_would_do():
    with pytest.raises(ValueError) as caught:
        Model(dataclasses.replace(EVEN, vocab_size=98), device="meta", ranks=Ranks(0, 8, ""))
    assert str(caught.value).split("\n  ") == [
        "8 ranks cannot share this model:",
        "vocab_size is 98, and 8 ranks need a multiple of 8",
        "num_attention_heads is 4, and 8 ranks need a multiple of 8",
        "kda_num_heads is 4, and 8 ranks need a multiple of 8",
        "moe_intermediate_size is 128, and 8 ranks need a multiple of 256" + SCALE,
        "of up to 128 ranks, these numbers can share it: 1, 2",
    ]
    check(EVEN, 4)
