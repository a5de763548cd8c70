"""Pools are sized exactly from a byte budget, and what does not fit is refused with the numbers."""

import pytest
from k3compile.runtime.cache.sizing import measure, pool_bytes, size_pools
from k3compile.runtime.engine_config import DEFAULT_CACHE_BYTES, EngineConfig

SLOT, PAGE = 8 * (1 + 3 + 1 + 1 + 1 + 1), 8 * 4  # the toy's float64 numbers without drafts


@pytest.fixture
def pools(toy):
    return toy.Model().make_pools


def test_bytes_are_measured_on_the_model_itself(pools):
    assert measure(pools, 4, 0) == (SLOT, PAGE)
    assert measure(pools, 8, 3) == (8 * (1 + 3 + 4 * 4), 8 * 8)


@pytest.mark.parametrize("budget", [SLOT * 5 + PAGE * 2, 5000, 10_001, 65_536])
def test_a_byte_budget_is_used_to_the_last_page_and_never_passed(pools, budget):
    config = EngineConfig(max_num_seqs=4, page_size=4, kv_cache_bytes=budget)
    sizes = size_pools(config, pools, 4096)
    made = pools(sizes.num_slots, sizes.num_pages, sizes.page_size, 0)
    assert pool_bytes(made) == sizes.total_bytes <= budget < sizes.total_bytes + PAGE


def test_without_a_budget_no_more_pages_than_requests_can_use(pools):
    sizes = size_pools(EngineConfig(max_num_seqs=4, page_size=4, max_model_len=10), pools, 4096)
    assert (sizes.num_pages, sizes.num_slots) == (4 * 3 + 1, 5)
    assert sizes.total_bytes < DEFAULT_CACHE_BYTES


def test_the_longest_request_is_what_pages_and_model_allow(pools):
    few = EngineConfig(num_pages=6, page_size=4)
    many = EngineConfig(num_pages=5000, page_size=4)
    assert size_pools(few, pools, 4096).max_model_len == 20
    assert size_pools(many, pools, 4096).max_model_len == 4096


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kv_cache_bytes": 100}, "does not hold 17 state slots of 64 B and 2 pages of 32 B"),
        ({"num_pages": 6, "max_model_len": 21}, "max_model_len=21, but 6 pages of 4 hold 20 tokens"),
        ({"max_model_len": 5000}, "max_model_len=5000, but the model's context is 4096"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(pools, config, message):
    with pytest.raises(ValueError, match=message):
        size_pools(EngineConfig(page_size=4, **config), pools, 4096)


def test_the_line_that_is_printed_at_the_start_has_all_numbers(pools):
    sizes = size_pools(EngineConfig(num_pages=101, page_size=4), pools, 4096)
    assert str(sizes) == (
        "pools: 101 pages x 4 tokens (32 B each, 400 tokens), 17 state slots (64 B each), 4,320 B in all; "
        "max_model_len 400"
    )
