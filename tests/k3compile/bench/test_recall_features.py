"""The trained tiny model gives the same answers, and as many right ones, whatever is switched on.

In float64, where rounding cannot tell two ways of serving apart. Every problem is asked twice: with a prefix
cache, the second time from what the first one left.
"""

import os

import pytest

from k3compile import LLM
from k3compile.bench.recall import answers, generate, right, tasks
from k3compile.cli.loading import SHIPPED
from k3compile.features import FEATURES, OPTIMISATIONS, expand, subsets
from k3compile.options import CompileOptions

FULL = bool(os.environ.get("K3_ACCEPT"))  # every check at its full count
COUNT = 20 if FULL else 2
PROBLEMS = [problem for name in tasks for problem in generate(name, COUNT, seed=11)]
SIZES = {"max_num_seqs": 8, "page_size": 16, "max_model_len": 1024}
CACHE = {"block_size": 64, "prefix_match_unit": 32, "num_checkpoints": 400}
CAPABLE = frozenset({"prefix_cache", "speculate", "offload"})
PASSES = frozenset(name for name, feature in FEATURES.items() if feature.by == "pass")
SETS = {"+".join(n for n in FEATURES if n in s) or "nothing": s for s in subsets()}
FEW = [CAPABLE | expand("default"), CAPABLE, frozenset({"prefix_cache", "state_export"})]
MORE = [frozenset({"prefix_cache"}), frozenset({"speculate"}), CAPABLE | {"adaptive_budget", "state_replay"}]
CHOSEN = {name: s for name, s in SETS.items() if FULL or s in (*FEW, *MORE)}


def served(features, **config):
    """The trained model with these features, compiled where one of them is a pass."""
    if "prefix_cache" in features:
        config = CACHE | config
    if "offload" in features and "offload_dir" not in config:
        config = {"offload_host_bytes": 1 << 28} | config
    optimised = tuple(name for name in OPTIMISATIONS if name in features)
    return LLM(
        SHIPPED,
        dtype="float64",
        compile=bool(features & PASSES),
        options=CompileOptions(features=optimised or "baseline", inner="aot_eager"),
        prefix_cache="prefix_cache" in features,
        num_drafts=7 if "speculate" in features else 0,
        **SIZES,
        **config,
    )


def said(llm):
    return answers(llm.engine, llm.tokenizer, PROBLEMS)


def share(llm, told):
    return sum(right(p, tokens, llm.tokenizer) for p, tokens in zip(PROBLEMS, told)) / len(PROBLEMS)


@pytest.fixture(scope="module")
def known():
    """What the model as it is written says, with nothing switched on."""
    llm = served(frozenset())
    told = said(llm)
    assert share(llm, told) >= (0.99 if FULL else 0.95)
    return told


def same(llm, known):
    told = said(llm)
    assert told == known
    assert share(llm, told) == share(llm, known)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN)
def test_a_set_of_features_changes_no_answer_cold_or_after_a_hit(known, name):
    features = SETS[name]
    llm = served(features)
    for _ in range(2):
        same(llm, known)
    stats = llm.engine.stats()
    assert (stats.prefix_hit_tokens > 0) == ("prefix_cache" in features)
    llm.engine.stop()


@pytest.mark.slow
def test_answers_are_the_same_after_a_hit_and_after_a_round_trip_through_the_host(known):
    llm = served(frozenset({"prefix_cache", "offload"}))
    same(llm, known)
    cold = llm.engine.stats().rows
    same(llm, known)
    assert llm.engine.stats().rows < 1.7 * cold, "hardly anything was found"
    assert llm.engine.tiers.drain(60)
    llm.engine.cache.drop()
    same(llm, known)
    assert llm.engine.stats().offload.loads["done"] > len(PROBLEMS) // 2
    llm.engine.stop()


@pytest.mark.slow
def test_answers_are_the_same_after_a_restart(known, tmp_path):
    for life in range(2):
        llm = served(frozenset({"prefix_cache", "speculate", "offload"}), offload_dir=str(tmp_path))
        same(llm, known)
        loads = llm.engine.stats().offload.loads.get("done", 0)
        assert (loads > len(PROBLEMS) // 2) == (life == 1)
        llm.engine.stop()
