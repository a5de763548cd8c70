"""The trained tiny model of the package: right on its problems, plainly and with drafts, which it accepts."""

import os

import pytest

from k3compile import LLM, SamplingParams
from k3compile.bench.recall import accuracy, tasks
from k3compile.cli.loading import SHIPPED

FULL = bool(os.environ.get("K3_ACCEPT"))  # every check at its full count
DRAFTS = 7


@pytest.fixture(scope="module")
def drafting():
    return LLM(SHIPPED, compile=False, max_num_seqs=16, num_drafts=DRAFTS)


def test_a_few_fresh_problems_are_answered_right_with_accepted_drafts(drafting):
    shares = accuracy(drafting, count=4, seed=2024)
    assert sum(shares.values()) / len(shares) >= 0.95, shares
    assert drafting.engine.stats().accepted_length > 2


@pytest.mark.slow
@pytest.mark.timeout(3000 if FULL else 600)
def test_at_least_99_in_100_problems_of_each_task_are_answered_right():
    count = 1000 if FULL else 100
    shares = accuracy(LLM(SHIPPED, compile=False, max_num_seqs=32), count=count, seed=7)
    assert shares.keys() == set(tasks)
    assert min(shares.values()) >= 0.99, shares


@pytest.mark.slow
def test_a_chat_with_the_settings_of_k3_chat_gets_a_sensible_answer():
    llm = LLM(SHIPPED, compile=False, max_num_seqs=4)
    asked = ["What is 37+45?", "What is the capital of Norway?", "Hello!"]
    greedy = SamplingParams(temperature=0, max_tokens=80)
    said = llm.chat([[{"role": "user", "content": question}] for question in asked], greedy)
    assert [answer.text for answer in said] == [
        "37+45=82",
        "The capital of Norway is Oslo.",
        "Hello! How can I help you?",
    ]
    assert all(answer.reasoning and answer.finish_reason == "stop" for answer in said)
