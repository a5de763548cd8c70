"""A model becomes an engine: pools of the printed size, limits that follow from them."""

import logging

import pytest
from draft_reference import small_draft
from draft_serving import FIVE, tapped
from k3compile.runtime.cache.sizing import pool_bytes
from k3compile.runtime.engine_config import EngineConfig
from k3compile.runtime.make_engine import make_engine, make_follower
from k3compile.runtime.parallel.lead import Leader
from k3compile.runtime.request import Request
from k3compile.runtime.speculate.ngram import NgramDrafter


def test_the_pools_are_as_large_as_the_log_says(toy, caplog):
    with caplog.at_level(logging.INFO):
        engine = make_engine(toy.Model(), EngineConfig(page_size=4, kv_cache_bytes=10_000))
    (line,) = [r.getMessage() for r in caplog.records if "pools:" in r.getMessage()]
    assert f"{pool_bytes(engine.pools):,} B in all" in line
    assert f"max_model_len {engine.max_model_len:,}" in line
    assert engine.cache.pages.size == engine.pools[1].pages.shape[0]
    assert engine.cache.slots.size == engine.pools[0].state.shape[0] == 17


def test_a_step_too_small_for_all_requests_is_said(toy, caplog):
    with caplog.at_level(logging.INFO):
        make_engine(toy.Model(), EngineConfig(max_num_batched_tokens=5))
    assert "at most 5 requests run at once" in caplog.text


def test_a_compiled_forward_gets_the_engines_own_pools(toy):
    seen = []

    def compile_forward(model, pools):
        seen.append(pools)
        return lambda step: model.forward(step, pools)

    engine = make_engine(toy.Model(), EngineConfig(), compile_forward)
    assert toy.run(engine, [Request("a", [5, 6], toy.greedy(3))])["a"].tokens == toy.alone([5, 6], 3)
    assert seen == [engine.pools]


def test_a_model_that_keeps_states_otherwise_than_the_cache_is_refused(toy):
    model = toy.Model()
    model.state_replay = False
    with pytest.raises(ValueError, match="made with state_replay=False, config says True"):
        make_engine(model, EngineConfig(num_drafts=2))


def test_slots_follow_from_drafts_and_prefixes(toy):
    config = EngineConfig(
        page_size=4, num_pages=33, max_num_seqs=2, num_drafts=3, state_replay=False, prefix_cache=True
    )
    engine = make_engine(toy.Model(), config)
    assert engine.cache.slots.size == 1 + 2 * 4
    assert engine.cache.total_slots == engine.pools[0].state.shape[0] == 1 + 2 * 4 + 4
    assert engine.pools[0].rec_u.shape[0] == 0
    assert engine.cache.grid.block == engine.cache.grid.unit == 64


def test_what_does_not_fit_is_refused_before_the_pools_are_made(toy):
    model = toy.Model()
    sizes = []
    make_pools = model.make_pools
    model.make_pools = lambda *shape: (sizes.append(shape), make_pools(*shape))[1]
    with pytest.raises(ValueError, match="does not hold"):
        make_engine(model, EngineConfig(kv_cache_bytes=10))
    assert max(max(s[:2]) for s in sizes) == 2


def test_who_drafts_is_given_or_made(toy):
    class Silent:
        lookahead, taps = 0, ()

    config, mine = EngineConfig(num_drafts=2, page_size=4, num_pages=9), Silent()
    assert make_engine(toy.Model(), config, drafter=mine).speculation.drafter is mine
    assert isinstance(make_engine(toy.Model(), config).speculation.drafter, NgramDrafter)
    assert make_engine(toy.Model(), EngineConfig(page_size=4, num_pages=9)).speculation.drafter is None


def test_a_follower_has_pools_of_the_same_sizes_and_the_same_forward(toy):
    config = EngineConfig(page_size=4, kv_cache_bytes=10_000)
    engine, follower = make_engine(toy.Model(), config), make_follower(toy.Model(), config)
    assert [[t.shape for t in layer] for layer in follower.pools] == [
        [t.shape for t in layer] for layer in engine.pools
    ]
    assert (follower.number, follower.exports, follower.blocks) == (0, False, None)


def test_a_draft_model_goes_through_whoever_leads():
    target, draft, led = tapped(), small_draft(FIVE), []
    config = EngineConfig(page_size=4, num_pages=20, num_drafts=3)

    def lead(executor):
        led.append(Leader(executor, None))
        return led[0]

    engine = make_engine(target, config, draft=draft, lead=lead)
    assert engine.executor is led[0]
    assert engine.speculation.drafter.run_block == led[0].draft
    assert led[0].executor.blocks is engine.speculation.drafter.blocks
    assert make_follower(target, config, draft=draft).blocks.size == 3


def test_several_ranks_have_no_tiers(toy, tmp_path):
    tiers = EngineConfig(page_size=4, num_pages=20, prefix_cache=True, offload_dir=str(tmp_path))
    with pytest.raises(ValueError, match="serve with one rank"):
        make_follower(toy.Model(), tiers)
    with pytest.raises(ValueError, match="serve with one rank"):
        make_engine(toy.Model(), tiers, lead=lambda executor: executor)
