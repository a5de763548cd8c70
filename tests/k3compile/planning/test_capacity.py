"""How many requests of which length: by division as planned, by search at best."""

from dataclasses import replace

import pytest
from k3compile.runtime.engine_config import EngineConfig

from k3compile.planning.capacity import at_once, best, capacities
from k3compile.planning.gpus import GPUS
from k3compile.planning.plan import Question, make_plan
from k3compile.planning.released import read_model

ENGINE = EngineConfig(max_num_batched_tokens=8192, max_num_seqs=64, prefix_cache=True)
PLAN = make_plan(Question(read_model("kimi-k3"), GPUS["b300"], 8, ENGINE))


@pytest.mark.parametrize("context", [1, 64, 65, 8192, 100_000])
def test_as_planned_slots_and_pages_limit(context):
    pages = (PLAN.sizes.num_pages - 1) // -(-context // 64)
    assert at_once(PLAN, context) == min(64, pages)


@pytest.mark.parametrize("context", [2048, 8192, 131072])
def test_at_best_no_number_of_requests_does_better(context):
    def held(number):
        engine = replace(ENGINE, max_num_seqs=number, max_model_len=context)
        return at_once(make_plan(replace(PLAN.question, engine=engine)), context)

    most = best(PLAN, context)
    assert held(most) == most
    assert held(most + 1) <= most
    assert all(held(n) <= most for n in range(1, 2 * most + 20, max(most // 7, 1)))


def test_steps_limit_how_many_run():
    engine = replace(ENGINE, max_num_batched_tokens=256, num_drafts=8, long_prefill_tokens=16)
    plan = make_plan(replace(PLAN.question, engine=engine))
    assert at_once(plan, 1) == 256 // 8


def test_the_table_ends_with_the_longest_request():
    table = capacities(PLAN)
    assert [row.context for row in table] == sorted({row.context for row in table})
    assert table[-1].context == PLAN.sizes.max_model_len
    assert table[-1].requests >= 1
    assert all(row.most >= row.requests for row in table)


def test_nothing_is_searched_where_the_pages_are_fixed():
    plan = make_plan(replace(PLAN.question, engine=replace(ENGINE, num_pages=1000)))
    assert {row.most for row in capacities(plan)} == {None}
