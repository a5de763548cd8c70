"""Ends of prompts and junctions stay, the rest as often as asked."""

import pytest
from k3compile.runtime.cache.checkpoints import Grid
from k3compile.runtime.cache.retention import Retention

GRID = Grid(256, 64)


def kept(interval, prompt=1024, total=1024, junction=0):
    retention = Retention(GRID, interval)
    return [t for t in range(64, 1152, 64) if retention.wants(t, prompt, total, junction)]


def test_unset_keeps_every_block_and_both_ends_of_the_prompt():
    assert kept(None) == [256, 512, 768, 960, 1024]
    assert kept(None, prompt=1000, total=1000) == [256, 512, 768, 960, 1024]


def test_zero_keeps_only_ends_and_junctions():
    assert kept(0) == [960, 1024]
    assert kept(0, junction=320) == [320, 960, 1024]
    assert kept(0, prompt=1000, total=1000) == [960]


def test_an_interval_keeps_its_multiples():
    assert kept(512) == [512, 960, 1024]


def test_the_end_of_a_resumed_run_is_an_end_too():
    assert kept(0, prompt=500, total=900) == [448, 896]
    assert kept(0, prompt=512, total=900) == [448, 512, 896]


@pytest.mark.parametrize("interval", [-256, 64, 300])
def test_an_interval_where_no_state_is_made_is_refused(interval):
    with pytest.raises(ValueError, match=f"interval={interval} is neither 0 nor a multiple of .*=256"):
        Retention(GRID, interval)
