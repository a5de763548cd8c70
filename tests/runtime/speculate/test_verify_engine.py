"""Answers of a whole engine come as often with drafts as the model's own probabilities say."""

import pytest
import torch
from chi_square import Guesser, answers, fit, forget_the_residual, joint
from k3compile.runtime.engine_config import EngineConfig
from k3compile.runtime.make_engine import make_engine
from k3compile.runtime.request import Request, SamplingParams
from k3compile.runtime.sampler import distribution
from small_models import Row, dealt, make_step, small_model

PROMPT, LENGTH, COUNT = [5, 9, 2, 7, 5], 4, 320
PARAMS = {"top_k": 2, "temperature": 0.5}
KINDS = [
    ("block", True),
    pytest.param("block", False, marks=pytest.mark.slow),
    pytest.param("standard", True, marks=pytest.mark.slow),
    pytest.param("standard", False, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def model():
    return small_model(dealt(1))  # five layers of all kinds


@pytest.fixture(scope="module")
def next_probabilities(model):
    """By one prefill of everything, without a cache, a scheduler or a draft."""
    owner = Request("known", PROMPT, SamplingParams(**PARAMS))

    def after(prefix):
        tokens, pools = [*PROMPT, *prefix], model.make_pools(2, 3, 8, 3)
        hidden, _ = model.forward(make_step([Row(tokens, 1, 0, [1, 2])]), pools)
        return distribution(model.logits(hidden[-1:]), [owner])[0]

    return after


@pytest.fixture(scope="module")
def expected(next_probabilities):
    with torch.no_grad():
        return joint(next_probabilities, LENGTH)


def doubt(model, next_probabilities, expected, rule: str, drawn: bool, **settings) -> float:
    config = EngineConfig(
        max_num_seqs=16,
        num_pages=40,
        page_size=8,
        num_drafts=3,
        verification=rule,
        max_model_len=16,
        **settings,
    )
    with torch.no_grad():
        engine = make_engine(model, config, drafter=Guesser(next_probabilities, 3, drawn))
        sequences = answers(engine, PROMPT, COUNT, max_tokens=LENGTH, ignore_eos=True, **PARAMS)
    assert engine.speculation.drafter is not None, engine.speculation.error
    if not config.adaptive_verification:
        assert engine.stats().steps < COUNT / 16 * LENGTH  # drafts were kept
    else:
        assert 0 < engine.speculation.adaptive.kept < engine.speculation.adaptive.tried
    return fit(sequences, expected)


@pytest.mark.parametrize(("rule", "drawn"), KINDS)
def test_answers_of_an_engine_come_as_often_as_the_model_says(
    model, next_probabilities, expected, rule, drawn
):
    assert doubt(model, next_probabilities, expected, rule, drawn) > 1e-3


def test_choosing_how_many_drafts_to_verify_changes_nothing_in_them(model, next_probabilities, expected):
    assert doubt(model, next_probabilities, expected, "block", True, adaptive_verification=True) > 1e-3


@pytest.mark.parametrize(("rule", "drawn"), KINDS[:3])
def test_a_biased_verifier_is_found(model, next_probabilities, expected, rule, drawn, monkeypatch):
    forget_the_residual(monkeypatch)
    assert doubt(model, next_probabilities, expected, rule, drawn) < 1e-3
