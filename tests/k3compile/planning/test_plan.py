"""Memory, pools and verdict of a plan, against the engine's own sizes and the published worked examples."""

from dataclasses import replace

import pytest
import torch
from k3compile.runtime.cache.checkpoints import block_size
from k3compile.runtime.cache.sizing import pool_bytes, size_pools
from k3compile.runtime.config import K3Config
from k3compile.runtime.engine_config import EngineConfig
from k3compile.runtime.parallel.ranks import world
from k3compile.runtime.speculate.dspark_weights import load_draft
from k3compile.runtime.speculate.make_drafter import with_draft
from k3compile.runtime.weights import load_model
from threaded_ranks import on_threads

from k3compile.cli.loading import SHIPPED
from k3compile.planning.gpus import GPUS, Gpu
from k3compile.planning.plan import LEAST_CONTEXT, Question, make_plan
from k3compile.planning.released import read_draft, read_model

K3 = read_model("kimi-k3")
DRAFT = read_draft("released", K3)
ENGINE = EngineConfig(max_num_batched_tokens=16384, max_num_seqs=64, prefix_cache=True)
ON_B300 = Question(K3, GPUS["b300"], 8, ENGINE)


@pytest.mark.parametrize(
    ("gpu", "fits"), [("b300", True), ("b200", False), ("h200", False), ("mi355x", True)]
)
def test_kimi_k3_on_eight_gpus_fits_where_they_hold_it(gpu, fits):
    plan = make_plan(replace(ON_B300, gpu=GPUS[gpu]))
    assert plan.fits is fits
    if not fits:
        assert "nothing is left for pools" in plan.misfits[0]


def test_what_is_planned_with_is_weights_reserve_and_pools():
    plan = make_plan(ON_B300)
    assert plan.memory == int(288e9 * 0.92)
    assert plan.memory == plan.weight_bytes + plan.reserve.total + plan.room
    assert 0 <= plan.room - plan.sizes.total_bytes < plan.sizes.bytes.page + plan.sizes.bytes.slot
    given = make_plan(replace(ON_B300, reserve=20 * 10**9, usable=1.0))
    assert given.room == 288 * 10**9 - given.weight_bytes - 20 * 10**9


@pytest.mark.parametrize(("context", "drafts"), [(1, 0), (1, 3), (4, 3)])
def test_pools_are_those_that_every_rank_of_an_engine_makes(context, drafts):
    config = K3Config.from_file(SHIPPED)
    draft = read_draft(str(SHIPPED / "draft"), config) if drafts else None
    engine = EngineConfig(max_num_seqs=4, prefix_cache=True, num_drafts=drafts, kv_cache_bytes=12_000_000)
    gpu = Gpu("small", 2 * 10**9, 1.0, 1.0, 8, "")
    plan = make_plan(Question(config, gpu, 4, engine, context, draft, reserve=0, dtype="float32"))
    assert plan.fits, plan.misfits

    def work(rank):
        ranks = world(context)
        drafting = load_draft(SHIPPED / "draft", config, torch.float32, ranks=ranks) if drafts else None
        taps = drafting.config.target_layer_ids if drafting else ()
        model = load_model(SHIPPED, torch.float32, tap_layers=taps, ranks=ranks)
        make_pools = with_draft(model, drafting)
        sizes = size_pools(engine, make_pools, config.max_position_embeddings)
        counts = (sizes.total_slots, sizes.num_pages, sizes.page_size, drafts, sizes.record_slots)
        return sizes, pool_bytes(make_pools(*counts))

    assert on_threads(4, work) == [(plan.sizes, plan.sizes.total_bytes)] * 4


@pytest.mark.parametrize(
    ("state", "token", "alignment", "block"),
    [
        (814_080, 1152, 128, 768),
        (878_592, 1152, 128, 768),
        (887_808, 1152, 128, 896),
        (814_080, 576, 128, 1536),
        (878_592, 576, 128, 1536),
        (887_808, 576, 128, 1664),
        (887_808, 1152, 16, 784),
        (887_808, 576, 16, 1552),
    ],
)
def test_the_block_rule_gives_the_published_sizes(state, token, alignment, block):
    assert block_size(state, token, alignment) == block


def test_the_block_of_kimi_k3_at_eight_ranks_is_768_with_and_without_drafts():
    plain = make_plan(ON_B300).sizes
    drafting = make_plan(replace(ON_B300, draft=DRAFT, engine=replace(ENGINE, num_drafts=7))).sizes
    for sizes in (plain, drafting):  # records lie beside the state, so drafts do not change a block
        assert (sizes.bytes.layer_slot, sizes.bytes.layer_page) == (814_080, 64 * 1152)
        assert sizes.block_size == 768
    assert plain.bytes.slot == 69 * 814_080
    assert plain.bytes.page == 24 * 64 * 1152
    assert drafting.bytes.page == 29 * 64 * 1152  # the draft's five layers
    assert drafting.bytes.records == 69 * 8 * (3 * 12 * 128 * 4 + 3 * 12 * 128 * 2)


def test_a_context_group_holds_a_page_together():
    alone, dealt = make_plan(ON_B300).sizes, make_plan(replace(ON_B300, dcp=8)).sizes
    assert dealt.bytes.page * 8 == alone.bytes.page
    assert dealt.tokens > 7 * alone.tokens


def test_what_cannot_be_dealt_out_is_said_without_counting():
    plan = make_plan(replace(ON_B300, tp=7))
    assert not plan.fits
    assert (plan.sizes, plan.weights) == (None, {})
    assert any("num_attention_heads is 96" in line for line in plan.misfits)
    assert "must divide tp" in " ".join(make_plan(replace(ON_B300, dcp=3)).misfits)


def test_a_request_of_some_length_has_to_fit_if_nobody_says_how_long_they_are():
    engine = replace(ENGINE, kv_cache_bytes=129 * 69 * 814_080 + 50 * 10**6)
    plan = make_plan(replace(ON_B300, engine=engine))
    assert plan.sizes.tokens < LEAST_CONTEXT
    assert "one request of 8,192 has to fit" in plan.misfits[0]
    assert make_plan(replace(ON_B300, engine=replace(engine, max_model_len=1024))).fits


def test_pools_that_were_asked_for_must_fit_too():
    plan = make_plan(replace(ON_B300, engine=replace(ENGINE, num_pages=100_000)))
    assert not plan.fits
    assert "were asked for" in plan.misfits[0]
    assert make_plan(replace(ON_B300, engine=replace(ENGINE, num_pages=1000))).fits


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tp": 0}, "tp must be at least 1"),
        ({"usable": 1.1}, "usable is 1.1"),
        ({"reserve": -1}, "reserve is -1"),
        ({"engine": EngineConfig(max_model_len=2**20 + 1)}, "the model's context is 1048576"),
        ({"draft": DRAFT}, "proposes 1 to 7"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        replace(ON_B300, **wrong)


def test_ranks_are_spread_evenly_over_as_few_nodes_as_hold_them():
    assert [replace(ON_B300, tp=n).nodes for n in (1, 8, 12, 16, 17)] == [1, 1, 2, 2, 17]
