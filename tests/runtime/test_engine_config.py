"""Engine settings: refused together, with reasons, before anything is built."""

import dataclasses

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
    ],
)
def test_contradictions_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**settings)


def test_all_of_them_come_at_once():
    with pytest.raises(ValueError, match=r"page_size .*; max_waiting .*; block_size must"):
        EngineConfig(page_size=0, max_waiting=0, block_size=0)


def test_settings_cannot_change_behind_the_engines_back():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().page_size = 3


def test_drafts_reach_the_scheduler_as_their_cost():
    limits = EngineConfig(num_drafts=8, draft_limit=80).limits(4096)
    assert (limits.draft, limits.max_active) == (DraftCost(7, 8), 10)
