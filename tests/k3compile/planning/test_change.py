"""What is suggested fits when it is planned again, and nothing smaller does."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from k3compile.runtime.engine_config import EngineConfig
from k3compile.runtime.parallel.sharding import objections
from small_models import SMALL

from k3compile.planning.change import changed, first, more_ranks, smallest_changes
from k3compile.planning.gpus import GPUS, Gpu
from k3compile.planning.plan import Question, make_plan
from k3compile.planning.released import read_draft, read_model

K3 = read_model("kimi-k3")
DRAFT = read_draft("released", K3)
ENGINE = EngineConfig(max_num_batched_tokens=16384, max_num_seqs=64, prefix_cache=True)
LONG = replace(ENGINE, max_model_len=2**20)


def suggested(question: Question) -> list[dict]:
    plan = make_plan(question)
    assert not plan.fits
    found = smallest_changes(plan)
    assert all(change.plan.fits for change in found)
    return [change.settings for change in found]


@pytest.mark.parametrize("gpu", ["b200", "h200"])
def test_kimi_k3_wants_twice_the_smaller_gpus(gpu):
    assert suggested(Question(K3, GPUS[gpu], 8, ENGINE)) == [{"tp": 16}]


def test_a_million_tokens_want_a_shorter_request_or_dealt_out_latents_or_more_ranks():
    found = suggested(Question(K3, GPUS["b300"], 8, LONG))
    assert [set(one) for one in found] == [{"max_model_len"}, {"dcp"}, {"tp"}]
    assert found[1:] == [{"dcp": 4}, {"tp": 16}]


@pytest.mark.slow
def test_fewer_ranks_with_another_change_stand_beside_more_ranks_alone():
    engine = replace(ENGINE, max_num_seqs=300)
    assert suggested(Question(K3, GPUS["h200"], 8, engine)) == [
        {"tp": 16, "max_num_seqs": 176},
        {"tp": 16, "max_num_batched_tokens": 1024},
        {"tp": 32},
    ]


def test_states_for_each_draft_want_replay_among_others():
    engine = replace(ENGINE, state_replay=False, num_drafts=7, max_num_seqs=100)
    found = suggested(Question(K3, GPUS["b300"], 8, engine, 1, DRAFT))
    assert {"state_replay": True} in found
    assert {"num_drafts"} in [set(one) for one in found]


@pytest.mark.parametrize(("tp", "nearest"), [(7, 8), (5, 4), (12, 8), (3, 2)])
def test_ranks_that_cannot_share_a_model_are_sent_to_the_nearest_that_can(tp, nearest):
    question = Question(K3, Gpu("large", 10**13, 1.0, 1.0, 8, ""), tp, ENGINE)
    assert suggested(question) == [{"tp": nearest}]


def test_a_context_group_that_does_not_divide_is_sent_to_the_nearest_that_does():
    question = Question(K3, GPUS["b300"], 8, ENGINE, dcp=3)
    assert {"dcp": 2} in suggested(question)


def test_nothing_is_suggested_where_nothing_helps():
    assert suggested(Question(K3, Gpu("small", 10**9, 1.0, 1.0, 8, ""), 8, ENGINE)) == []


def test_settings_that_contradict_each_other_are_no_candidates():
    question = Question(K3, GPUS["b300"], 8, replace(ENGINE, num_drafts=7), 1, DRAFT)
    assert changed(question, {"max_num_batched_tokens": 4}) is None
    assert changed(question, {"num_drafts": 0}).draft is None


@given(st.integers(0, 5000), st.integers(1, 5000))
def test_the_first_that_fits_is_found_by_halving(threshold, length):
    candidates = range(length)
    want = threshold if threshold < length else None
    assert first(candidates, lambda n: n >= threshold) == want


@st.composite
def questions(draw):
    """Thin models whose parts many numbers of ranks divide, on GPUs of about the size that they need."""
    config = replace(
        SMALL,
        vocab_size=96 * draw(st.sampled_from([1, 4])),
        num_attention_heads=draw(st.sampled_from([4, 12])),
        kda_num_heads=draw(st.sampled_from([4, 12])),
        num_experts=draw(st.sampled_from([4, 16])),
        moe_intermediate_size=32 * draw(st.sampled_from([4, 12])),
        max_position_embeddings=4096,
    )
    drafts = draw(st.integers(0, 4))
    engine = EngineConfig(
        max_num_seqs=draw(st.integers(1, 60)),
        max_num_batched_tokens=draw(st.sampled_from([512, 1024])),
        max_model_len=draw(st.one_of(st.none(), st.integers(64, 4096))),
        prefix_cache=draw(st.booleans()),
        num_drafts=drafts,
        state_replay=draw(st.booleans()),
        page_size=draw(st.sampled_from([16, 64])),
    )
    gpu = Gpu("thin", draw(st.integers(200_000, 6_000_000)), 1.0, 1.0, 8, "")
    tp = draw(st.sampled_from([1, 2, 4]))
    dcp = draw(st.sampled_from([n for n in (1, 2, 4) if tp % n == 0]))
    return Question(config, gpu, tp, engine, dcp, reserve=draw(st.sampled_from([0, 100_000])))


def fits(question: Question, **settings: int) -> bool:
    asked = changed(question, settings)
    return asked is not None and make_plan(asked).fits


def smaller(question: Question, name: str, value: int) -> list[int]:
    """All smaller changes of one setting, without the search's own lists."""
    engine, tp, dcp = question.engine, question.tp, question.dcp
    if name == "tp":
        page = engine.page_size
        return [n for n in range(tp + 1, value) if not objections(question.config, n, dcp, page, None)]
    if name == "dcp":
        return [n for n in range(dcp + 1, value) if tp % n == 0]
    if name == "state_replay":
        return []
    if name == "max_num_batched_tokens":
        return [2 * value] if 2 * value < engine.max_num_batched_tokens else []
    return list(range(value + 1, getattr(engine, name)))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(questions())
@pytest.mark.slow
def test_a_suggestion_fits_and_nothing_smaller_does(question):
    plan = make_plan(question)
    assume(not plan.fits)
    single = [c.settings for c in smallest_changes(plan) if len(c.settings) == 1]
    for one in single:
        ((name, value),) = one.items()
        assert fits(question, **one)
        less = smaller(question, name, value)
        less = less if len(less) < 12 else [*less[:4], *less[4::17], less[-1]]
        assert not [n for n in less if fits(question, **{name: n})]
    if not any("max_num_seqs" in one for one in single):
        assert not fits(question, max_num_seqs=1) or question.engine.max_num_seqs == 1
    if not any("tp" in one for one in single):
        assert not [n for n in more_ranks(question) if fits(question, tp=n)]
