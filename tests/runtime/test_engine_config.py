"""Engine settings: refused together, with reasons, before anything is built."""

import dataclasses

import numpy as np
import pytest
from k3compile.runtime.budget import DraftCost
from k3compile.runtime.engine_config import EngineConfig


def test_the_defaults_are_a_working_engine():
    config = EngineConfig()
    limits = config.limits(4096)
    assert (limits.max_num_batched_tokens, limits.max_num_seqs, limits.max_model_len) == (2048, 16, 4096)
    assert (limits.draft, config.num_slots) == (DraftCost(), 17)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"num_pages": 1}, "num_pages must be at least 2, got 1"),
        ({"max_waiting": 0}, "max_waiting must be at least 1"),
        ({"num_drafts": -1}, "num_drafts must be at least 0"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"max_model_len": -3}, "max_model_len must be at least 1"),
        ({"num_pages": 10, "kv_cache_bytes": 10}, "size the same thing"),
        ({"num_drafts": 8, "adaptive_budget": False, "max_num_seqs": 1024}, "leaves no token for a prompt"),
        ({"num_drafts": 17}, r"num_drafts must be 0 \(no drafts\) to 16, got 17"),
        ({"prefix_cache": True, "block_size": 100}, "block_size=100 is no multiple of page_size=64"),
        ({"prefix_cache": True, "prefix_match_unit": 32}, "prefix_match_unit=32 is no multiple of page_size"),
        (
            {"block_size": 192, "prefix_match_unit": 128},
            "=128 does not divide block_size=192",
        ),
        (
            {"block_size": 128, "retention_interval": 192},
            "=192 is no multiple of block_size=128",
        ),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"retention_interval": -1}, "retention_interval must be at least 0"),
        ({"prefix_cache": True, "num_checkpoints": 0}, "leaves prefix_cache nowhere to keep a state"),
        ({"offload_host_bytes": 1000}, "set prefix_cache, or leave it out"),
        ({"prefix_cache": True, "offload_disk_bytes": 1000}, "without offload_dir"),
        ({"verification": "blok"}, "verification must be block or standard, got 'blok'"),
        ({"draft_sampling": "no"}, "draft_sampling must be probabilistic or greedy, got 'no'"),
    ],
)
def test_contradictions_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**settings)


def test_a_count_below_none_is_one_line_and_not_a_puzzle_about_what_follows_from_it():
    with pytest.raises(ValueError) as error:
        EngineConfig(num_drafts=-1)
    assert str(error.value) == "num_drafts must be at least 0, got -1"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_drafts": "3"}, "num_drafts must be a whole number, got '3'"),
        ({"num_drafts": 2.5}, "num_drafts must be a whole number, got 2.5"),
        ({"max_num_seqs": None}, "max_num_seqs must be a whole number, got None"),
        ({"page_size": True}, "page_size must be a whole number, got True"),
        ({"prefix_cache": None}, "prefix_cache must be True or False, got None"),
        (
            {"offload_dir": 7, "kv_cache_bytes": 1e9},
            "kv_cache_bytes must be a .*; offload_dir must be a text",
        ),
    ],
)
def test_what_is_of_another_kind_is_refused_by_its_name(settings, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**settings)


def test_a_folder_may_be_a_path_and_a_number_one_of_numpy(tmp_path):
    EngineConfig(prefix_cache=True, offload_dir=tmp_path, num_pages=np.int64(9))


def test_all_of_them_come_at_once():
    with pytest.raises(ValueError, match=r"page_size .*; max_waiting .*; block_size must"):
        EngineConfig(page_size=0, max_waiting=0, block_size=0)


@pytest.mark.parametrize("drafts", [1, 7, 16])
def test_a_request_owns_one_slot_or_one_for_each_state_it_may_go_on_from(drafts):
    assert EngineConfig(num_drafts=drafts).num_slots == 17
    assert EngineConfig(num_drafts=drafts, state_replay=False).num_slots == 1 + 16 * (drafts + 1)
    assert EngineConfig(state_replay=False).num_slots == 17


@pytest.mark.parametrize("kept", [None, 0, 256, 512])
def test_sizes_that_fit_each_other_are_taken(kept):
    EngineConfig(prefix_cache=True, block_size=256, prefix_match_unit=64, retention_interval=kept)


def test_settings_cannot_change_behind_the_engines_back():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().page_size = 3


def test_drafts_reach_the_scheduler_as_their_cost():
    limits = EngineConfig(num_drafts=8, draft_limit=80).limits(4096)
    assert (limits.draft, limits.max_active) == (DraftCost(7, 8), 10)
