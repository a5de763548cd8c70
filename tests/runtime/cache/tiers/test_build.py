"""Tiers are what the settings ask for, or the settings are refused in one sentence."""

import logging

import pytest
import torch
from k3compile.runtime.cache.cache import Cache
from k3compile.runtime.cache.checkpoints import Grid
from k3compile.runtime.cache.tiers.build import build_tiers
from k3compile.runtime.engine_config import EngineConfig


def build(toy, weights=(), draft=(), pages=64, **settings):
    cache = Cache(pages, 3, 4, grid=Grid(4, 4, alignment=4), num_checkpoints=2)
    model = toy.Model()
    pools = model.make_pools(cache.total_slots, pages, 4, 0)
    config = EngineConfig(page_size=4, prefix_cache=True, **settings)
    return build_tiers(config, cache, pools, model.config, weights, draft)


def test_without_a_setting_there_are_no_tiers(toy):
    assert build(toy) is None


def test_a_tier_for_each_setting(toy, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    for host, folder in ((5000, None), (0, str(tmp_path)), (5000, str(tmp_path))):
        bytes_of = {"offload_host_bytes": host, "offload_disk_bytes": 100_000 if folder else 0}
        tiers = build(toy, offload_dir=folder, **bytes_of)
        offload = tiers.offload
        assert (offload.host is not None, offload.disk is not None) == (bool(host), bool(folder))
        assert offload.host is None or offload.host.capacity == 5000
        assert offload.disk is None or offload.disk.capacity == 100_000
        assert offload.unit == 4
        tiers.close()
    assert sum("holds 0 entries of this model" in r.getMessage() for r in caplog.records) == 2


def test_a_disk_tier_without_a_size_gets_one(toy, tmp_path):
    tiers = build(toy, offload_dir=str(tmp_path))
    assert tiers.offload.disk.capacity == 8 << 30
    tiers.close()


def test_a_tier_that_does_not_hold_a_block_is_refused_and_both_are_named(toy, tmp_path):
    settings = {"offload_host_bytes": 10, "offload_dir": str(tmp_path), "offload_disk_bytes": 20}
    with pytest.raises(ValueError, match="offload_host_bytes=10 and offload_disk_bytes=20: one block of 4"):
        build(toy, **settings)


def test_at_most_a_quarter_of_the_pages_is_pinned(toy):
    tiers = build(toy, pages=24, offload_host_bytes=5000)
    assert tiers.offload._queue == 6
    tiers.close()


def test_other_weights_are_another_model(toy, tmp_path):
    names = set()
    for value in (0.0, 1.0):
        weights = [("w", torch.full((3,), value))]
        tiers = build(toy, weights, offload_dir=str(tmp_path))
        names.add(tiers.offload.disk.fingerprint)
        tiers.close()
    assert len(names) == 2
