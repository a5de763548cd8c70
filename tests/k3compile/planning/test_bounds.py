"""What the GPU's figures allow at most."""

import pytest
from k3compile.runtime.engine_config import EngineConfig

from k3compile.planning.bounds import bounds, parameters_met
from k3compile.planning.gpus import GPUS
from k3compile.planning.plan import Question, make_plan
from k3compile.planning.released import read_model

K3 = read_model("kimi-k3")


def test_a_token_of_kimi_k3_meets_the_published_number_of_parameters():
    assert parameters_met(K3) == pytest.approx(104.19e9, rel=1e-3)


def test_one_token_reads_little_of_the_experts_and_nothing_of_the_embedding():
    plan = make_plan(Question(K3, GPUS["b300"], 8, EngineConfig(max_num_batched_tokens=8192)))
    most, weights = bounds(plan), plan.weights
    rest = sum(weights.values()) - weights["routed experts"] - weights["embedding"]
    state = 2 * 69 * 814_080
    assert most.token_bytes == pytest.approx(rest + weights["routed experts"] * 16 / 896 + state, abs=1)
    assert most.token_seconds == pytest.approx(most.token_bytes / 7.7e12)
    assert most.prompt_rate == pytest.approx(8 * 2.25e15 / (2 * most.parameters))
