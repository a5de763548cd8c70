"""Pools are sized exactly from a byte budget, and what does not fit is refused with the numbers."""

import dataclasses

import pytest
import torch
from k3compile.runtime.cache.pools import KdaPools
from k3compile.runtime.cache.sizing import Bytes, measure, pool_bytes, size_pools, unit_of
from k3compile.runtime.engine_config import DEFAULT_CACHE_BYTES, EngineConfig
from k3compile.runtime.model import Model
from k3compile.runtime.parallel.ranks import Ranks
from small_models import SMALL, SMALL_LINEAR

SLOT, RECORDS, PAGE = 8 * (1 + 3), 8 * 4, 8 * 4  # the toy's float64 numbers; records of one row
PREFIX = {"prefix_cache": True, "page_size": 4, "max_num_seqs": 4}


@pytest.fixture
def pools(toy):
    return toy.Model().make_pools


def test_bytes_are_measured_on_the_model_itself(pools):
    assert measure(pools, 4, 0) == (SLOT, RECORDS, PAGE, SLOT, PAGE)
    assert measure(pools, 8, 3) == (SLOT, 4 * RECORDS, 2 * PAGE, SLOT, 2 * PAGE)


def test_bytes_are_those_of_all_layers_and_a_block_is_found_from_one():
    each = measure(Model(SMALL, torch.bfloat16).make_pools, 8, 2)
    heads, width, channels = SMALL.kda_num_heads, SMALL.kda_head_dim, 72
    state, window = heads * width * width * 4, 3 * channels * 2
    records = 3 * (3 * heads * width * 4 + channels * 2)
    assert each == Bytes(10 * (state + window), 10 * records, 4 * 8 * 20 * 2, state + window, 8 * 20 * 2)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("budget", [5 * 4 * SLOT + 5 * 4 * RECORDS + PAGE * 2, 5000, 10_001, 65_536])
def test_a_byte_budget_is_used_to_the_last_page_and_never_passed(pools, budget, replay, drafts):
    config = EngineConfig(
        max_num_seqs=4, page_size=4, kv_cache_bytes=budget, num_drafts=drafts, state_replay=replay
    )
    sizes = size_pools(config, pools, 4096)
    made = make(pools, sizes)
    assert pool_bytes(made) == sizes.total_bytes <= budget < sizes.total_bytes + PAGE
    assert sizes.num_slots == sizes.total_slots == (17 if drafts and not replay else 5)


def make(pools, sizes):
    """The pools as the engine makes them."""
    return pools(sizes.total_slots, sizes.num_pages, sizes.page_size, sizes.num_drafts, sizes.record_slots)


@pytest.mark.parametrize("budget", [2000, 10_001, 65_536, 1_000_000])
@pytest.mark.parametrize("asked", [{}, {"block_size": 12}, {"num_checkpoints": 3}])
def test_kept_states_are_bought_with_the_pages_they_go_with(pools, budget, asked):
    sizes = size_pools(EngineConfig(kv_cache_bytes=budget, **PREFIX, **asked), pools, 4096)
    assert sizes.block_size == asked.get("block_size", 64)
    usual = max(sizes.num_pages * 4 // sizes.block_size, 4)
    assert sizes.num_checkpoints == asked.get("num_checkpoints", usual)
    assert sizes.total_slots == 5 + sizes.num_checkpoints
    assert pool_bytes(make(pools, sizes)) == sizes.total_bytes <= budget
    one_more = dataclasses.replace(
        sizes,
        num_pages=sizes.num_pages + 1,
        num_checkpoints=max(usual, (sizes.num_pages + 1) * 4 // sizes.block_size),
    )
    assert asked.get("num_checkpoints") or one_more.total_bytes > budget


def test_a_block_takes_in_an_mla_layer_what_a_state_takes_in_a_kda_layer():
    """k3-runtime 0.2 at eight ranks: 814,080 bytes of state and 1,152 of a token make 768 tokens."""

    def released(slots, pages, page_size, drafts, record_slots):
        kda = KdaPools(torch.empty(slots, 814_080, dtype=torch.uint8, device="meta"), *[torch.empty(0)] * 5)
        mla = torch.empty(pages, page_size, 1152, dtype=torch.uint8, device="meta")
        return [*[kda] * 69, *[(mla,)] * 24]

    for page, unit, block in (
        (64, None, 768),
        (128, None, 768),
        (64, 128, 768),
        (64, 256, 768),
        (96, None, 768),
    ):
        config = EngineConfig(prefix_cache=True, page_size=page, prefix_match_unit=unit, num_pages=100)
        assert size_pools(config, released, 4096).block_size == block


def test_without_a_prefix_cache_nothing_is_kept(pools):
    sizes = size_pools(EngineConfig(num_pages=99, num_checkpoints=7, block_size=64), pools, 4096)
    assert (sizes.num_checkpoints, sizes.block_size) == (0, 0)


def test_without_a_budget_no_more_pages_than_requests_can_use(pools):
    config = EngineConfig(max_num_seqs=4, page_size=4, max_model_len=10)
    sizes = size_pools(config, pools, 4096)
    assert (sizes.num_pages, sizes.num_slots) == (4 * 3 + 1, 5)
    assert sizes.total_bytes < DEFAULT_CACHE_BYTES
    cached = size_pools(dataclasses.replace(config, prefix_cache=True), pools, 4096)
    assert cached.num_pages == 4 * 4 * 3 + 1


def test_the_longest_request_is_what_pages_and_model_allow(pools):
    few = EngineConfig(num_pages=6, page_size=4)
    many = EngineConfig(num_pages=5000, page_size=4)
    assert size_pools(few, pools, 4096).max_model_len == 20
    assert size_pools(many, pools, 4096).max_model_len == 4096


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"kv_cache_bytes": 100},
            "does not hold 17 state slots of 32 B, 0 records of 32 B and 2 pages of 32 B",
        ),
        (
            {"kv_cache_bytes": 100, "num_drafts": 1},
            "does not hold 17 state slots of 32 B, 17 records of 64 B",
        ),
        ({"num_pages": 6, "max_model_len": 21}, "max_model_len=21, but 6 pages of 4 hold 20 tokens"),
        ({"max_model_len": 5000}, "max_model_len=5000, but the model's context is 4096"),
        ({"prefix_cache": True, "retention_interval": 96}, "96 is no multiple of the block of 64 tokens"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(pools, config, message):
    with pytest.raises(ValueError, match=message):
        size_pools(EngineConfig(page_size=4, **config), pools, 4096)


def test_the_line_that_is_printed_at_the_start_has_all_numbers(pools):
    sizes = size_pools(EngineConfig(num_pages=101, page_size=4), pools, 4096)
    assert str(sizes) == (
        "pools: 101 pages x 4 tokens (32 B each, 400 tokens), 17 state slots (32 B each), 3,776 B in all; "
        "max_model_len 400"
    )


def test_the_line_tells_of_prefixes_and_of_what_drafts_take_either_way(pools):
    config = EngineConfig(num_pages=101, num_drafts=8, **PREFIX)
    assert str(size_pools(config, pools, 4096)) == (
        "pools: 101 pages x 4 tokens (32 B each, 400 tokens), 5 state slots and 6 for prefixes (32 B each), "
        "5,024 B in all; max_model_len 400; a state is kept every 64 tokens; "
        "for 8 drafts a request owns 1 state and the records of 9 rows, 320 B (9 states, 288 B the other way)"
    )
    without = size_pools(dataclasses.replace(config, state_replay=False), pools, 4096)
    assert str(without).endswith(
        "for 8 drafts a request owns 9 states, 288 B (1 state and the records of 9 rows, 320 B the other way)"
    )


SHARED = dataclasses.replace(SMALL, num_attention_heads=8, kda_num_heads=8, moe_intermediate_size=256)


def in_context_groups(context: int) -> Model:
    """Rank 0 of 8."""
    return Model(SHARED, torch.bfloat16, "meta", ranks=Ranks(0, 8, "", context))


def test_in_a_context_group_the_same_bytes_hold_as_many_times_the_tokens():
    config = EngineConfig(max_num_seqs=4, page_size=64, kv_cache_bytes=2_000_000)
    sizes = {n: size_pools(config, in_context_groups(n).make_pools, 1 << 20) for n in (1, 2, 4, 8)}
    pages = {n: one.num_pages * one.bytes.page for n, one in sizes.items()}
    assert all(pages[1] - one.bytes.page < pages[n] for n, one in sizes.items())  # to the last page
    for n, one in sizes.items():
        assert n * one.bytes.page == sizes[1].bytes.page
        assert one.kept_of_page == 64 // n
        assert n * (sizes[1].tokens - 64) <= one.tokens <= n * (sizes[1].tokens + 128)
        assert one.max_model_len == one.tokens
        made = make(in_context_groups(n).make_pools, one)
        assert pool_bytes(made) == one.total_bytes <= config.kv_cache_bytes


def test_the_line_tells_which_part_of_a_page_a_rank_keeps():
    config = EngineConfig(max_num_seqs=2, page_size=64, num_pages=11)
    line = str(size_pools(config, in_context_groups(4).make_pools, 1 << 20))
    assert line.startswith(
        "pools: 11 pages x 64 tokens (2,560 B each, 640 tokens)"
    )  # 4 layers x 16 x 20 x 2 B
    assert "; each of 4 ranks keeps 16 tokens of a page" in line
    assert "ranks" not in str(size_pools(config, in_context_groups(1).make_pools, 1 << 20))


def test_states_are_kept_as_much_further_apart_as_a_page_takes_less():
    wide = dataclasses.replace(SHARED, kda_head_dim=64)
    config = EngineConfig(max_num_seqs=2, page_size=64, num_pages=99, prefix_cache=True)
    state = 64 * 64 * 4 + 3 * 3 * 64 * 2  # of a layer: one head a rank, float32, and its window
    for context, token in ((1, 40), (8, 5)):  # bytes of a token on a rank, in a layer
        model = Model(wide, torch.bfloat16, "meta", ranks=Ranks(0, 8, "", context))
        block = size_pools(config, model.make_pools, 1 << 20).block_size
        assert block - 64 < state / token <= block


def allocated(pools) -> int:
    """Bytes that the allocator gave for pools: of each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for layer in pools for t in layer}
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("config", [SMALL, SMALL_LINEAR], ids=["k3", "kimi-linear"])
def test_for_eight_drafts_a_request_takes_one_state_and_records_instead_of_nine_states(config):
    """From what the allocator hands out for one request more, not from a formula."""
    wide = dataclasses.replace(config, kda_head_dim=64)
    taken = {}
    for replay in (True, False):
        model = Model(wide, torch.float32, state_replay=replay)
        made = []
        for requests in (3, 4):
            asked = EngineConfig(max_num_seqs=requests, num_drafts=8, state_replay=replay, num_pages=4)
            sizes = size_pools(asked, model.make_pools, 4096)
            made.append(allocated(make(model.make_pools, sizes)))
            assert made[-1] == sizes.total_bytes
        taken[replay] = made[1] - made[0]
        assert taken[replay] == sizes.request_bytes
    (kda, *_), layers = model.make_pools(1, 1, 8), len(wide.kda_layers)
    state = layers * allocated([(kda.state[:1].clone(), kda.window[:1].clone())])
    assert taken[False] == 9 * state
    assert taken[True] < 0.4 * taken[False]
    assert taken[True] > state


@pytest.mark.parametrize(
    ("asked", "block", "unit"),
    [
        ({}, 768, 64),
        ({"page_size": 48}, 768, 192),
        ({"prefix_match_unit": 256}, 768, 256),
        ({"page_size": 96}, 96, 96),  # 192 does not divide it
        ({"page_size": 8}, 16, 16),
    ],
)
def test_hits_are_as_fine_as_blocks_and_pages_allow(asked, block, unit):
    assert unit_of(EngineConfig(**asked), block) == unit
