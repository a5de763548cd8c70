"""The cost table: medians, a line between and beyond, and a real forward that is timed without a request."""

import numpy as np
import pytest
import torch
from k3compile.runtime.cache.pools import KdaPools
from k3compile.runtime.engine_config import EngineConfig
from k3compile.runtime.executor import Executor
from k3compile.runtime.speculate.costs import (
    CostTable,
    context_of,
    measure,
    measure_draft,
    measure_forward,
    null_work,
    row_counts,
)
from k3compile.runtime.speculate.ngram import NgramDrafter
from k3compile.runtime.step import build
from small_models import small_model


def test_a_table_takes_medians_and_never_falls():
    table = CostTable.of({8: [5.0, 1.0, 1.2], 1: [2.0, 2.0, 9.0], 16: [3.0, 3.0, 3.0]})
    assert table == CostTable((1, 8, 16), (2.0, 2.0, 3.0))


def test_between_the_sizes_is_a_line_and_beyond_it_goes_on():
    table = CostTable((2, 4, 8), (1.0, 2.0, 10.0))
    assert table.at(np.array([1, 2, 3, 4, 6, 8, 9, 12])).tolist() == [1, 1, 1.5, 2, 6, 10, 12, 18]
    assert CostTable((4,), (3.0,)).at(np.array([1, 4, 99])).tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [((), ()), ((1, 2), (1.0,)), ((2, 1), (1.0, 2.0)), ((1, 2), (2.0, 1.0)), ((1, 1), (1.0, 1.0))],
)
def test_a_table_that_is_none_is_refused(rows, seconds):
    with pytest.raises(ValueError, match="got"):
        CostTable(rows, seconds)


def test_each_size_is_warmed_once_and_timed_five_times():
    ran, now = [], [0.0]

    def run(rows):
        ran.append(rows)
        now[0] += rows + (100 if ran.count(rows) in (1, 4) else 0)  # the warm-up and one timed run are slow

    assert measure(run, [3, 7], clock=lambda: now[0]) == CostTable((3, 7), (3.0, 7.0))
    assert ran == [3] * 6 + [7] * 6


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"max_num_seqs": 4, "num_drafts": 7}, [1, 2, 4, 8, 16, 32]),
        ({"max_num_seqs": 3, "num_drafts": 2}, [1, 2, 4, 8, 9]),
        ({"max_num_seqs": 16, "num_drafts": 7, "max_num_batched_tokens": 50}, [1, 2, 4, 8, 16, 32, 50]),
        ({"max_num_seqs": 1, "num_drafts": 0}, [1]),
    ],
)
def test_sizes_reach_what_a_step_can_hold(settings, sizes):
    assert row_counts(EngineConfig(**settings)) == sizes


@pytest.mark.parametrize("rows", [1, 4, 5, 11])
def test_the_rows_that_are_timed_are_verify_rows_that_belong_to_nobody(rows):
    batch = build(null_work(rows, EngineConfig(num_drafts=3, page_size=4), context=10), 8, 3)
    assert len(batch.step.tokens) == len(batch.logit_rows) == rows
    assert batch.step.spans.tolist() == [rows - (rows % 4 == 1), int(rows % 4 == 1), 0]
    assert not batch.step.slots.any()
    assert not batch.step.pages.any()
    assert (batch.step.seen == 10).all()
    assert batch.step.pages.shape[1] * 4 >= 10 + min(rows, 4)


@pytest.mark.parametrize("replay", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_real_model_is_timed_and_what_requests_will_read_stays_as_it_is(replay):
    model = small_model(state_replay=replay)
    config = EngineConfig(max_num_seqs=2, num_drafts=3, page_size=4, max_model_len=40, state_replay=replay)
    pools = model.make_pools(1 + config.max_num_seqs * config.slots_per_request, 5, 4, 3)
    before = [[t.clone() for t in pool] for pool in pools]
    steps = []

    def forward(step):
        steps.append(len(step.tokens))
        return model.forward(step, pools)

    table = measure_forward(Executor(pools, forward, model.logits), config)
    assert table.rows == (1, 2, 4, 8)
    assert min(table.seconds) > 0
    assert steps == [n for n in (1, 2, 4, 8) for _ in range(6)]
    for old, new in zip(before, pools):
        for was, tensor in zip(old, new):
            states = isinstance(new, KdaPools) and not replay  # written before whoever gets them clears them
            assert states or torch.equal(was[1:], tensor[1:])


def test_a_drafter_is_timed_for_one_request_to_all_and_forgets_them():
    config = EngineConfig(max_num_seqs=3, num_drafts=2, page_size=4, max_model_len=40)
    drafter = NgramDrafter(2)
    asked, propose = [], drafter.propose

    def watched(requests, holdings):
        asked.append(len(requests))
        assert [len(h.pages) * 4 >= r.seen + 1 for r, h in zip(requests, holdings, strict=True)]
        return propose(requests, holdings)

    drafter.propose = watched
    table = measure_draft(drafter, config)
    assert table.rows == (1, 2, 3)
    assert asked == [1] * 6 + [2] * 6 + [3] * 6
    assert len(drafter._indices) == 0


def test_where_the_null_page_is_poisoned_no_context_is_read():
    settings = {"max_model_len": 40, "num_drafts": 3}
    assert context_of(EngineConfig(**settings)) == 36
    assert context_of(EngineConfig(**settings, poison=True)) == 0
    assert context_of(EngineConfig(max_model_len=1 << 20)) == 8192
