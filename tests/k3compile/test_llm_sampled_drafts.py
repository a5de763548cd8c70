"""The trained tiny model with its own draft gives sampled answers as often as its probabilities say."""

import pytest
import torch
from chi_square import answers, fit, forget_the_residual, joint
from k3compile.runtime.request import Request, SamplingParams
from k3compile.runtime.sampler import distribution
from small_models import Row, make_step

from k3compile import LLM

LENGTH, COUNT, DRAFTS = 3, 320, 3
PARAMS = {"top_k": 2, "temperature": 3.0}


@pytest.fixture(scope="module")
def llm():
    return LLM(compile=False, num_drafts=DRAFTS, draft_sampling="greedy", max_num_seqs=16, max_model_len=64)


@pytest.fixture(scope="module")
def prompt(llm):
    return llm.tokenizer.encode("The capital of")


@pytest.fixture(scope="module")
def expected(llm, prompt):
    """By one prefill of everything, without a cache, a scheduler or a draft."""
    owner = Request("known", prompt, SamplingParams(**PARAMS))

    def after(prefix):
        tokens = [*prompt, *prefix]
        pools = llm.model.make_pools(2, 2, 64, DRAFTS)
        hidden, _ = llm.model.forward(make_step([Row(tokens, 1, 0, [1])]), pools)
        return distribution(llm.model.logits(hidden[-1:]), [owner])[0]

    with torch.no_grad():
        return joint(after, LENGTH)


def doubt(llm, prompt, expected):
    before = llm.engine.stats()
    said = answers(llm.engine, prompt, COUNT, max_tokens=LENGTH, ignore_eos=True, **PARAMS)
    assert llm.engine.speculation.error is None
    assert llm.engine.stats().steps - before.steps < COUNT / 16 * LENGTH, "no draft was kept"
    return fit(said, expected)


@pytest.mark.slow
def test_answers_come_as_often_as_the_model_says(llm, prompt, expected):
    assert doubt(llm, prompt, expected) > 1e-3


@pytest.mark.slow
def test_a_biased_verifier_is_found(llm, prompt, expected, monkeypatch):
    forget_the_residual(monkeypatch)
    assert doubt(llm, prompt, expected) < 1e-3
