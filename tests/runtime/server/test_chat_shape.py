"""Chunks of a chat: order, carried log-probabilities, ids. Equality with whole answers: test_endpoints.py."""

import pytest
from fake_engine import FakeEngine
from serving import ANSWER, ids_of, makes_chunks


def test_role_first_then_deltas_in_order_then_the_end():
    deltas = [chunk["choices"][0]["delta"] for chunk in makes_chunks(FakeEngine, ANSWER, block=100)]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Let me think.", "reasoning": "Let me think."},
        {"content": "Grüße!"},
        {},
    ]


def test_only_the_last_chunk_of_a_choice_has_a_finish_reason():
    chunks = makes_chunks(FakeEngine, ANSWER)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


@pytest.mark.parametrize("block", [1, 4])
def test_tokens_that_show_nothing_hand_their_logprobs_to_the_next_chunk(block):
    chunks = makes_chunks(FakeEngine, ANSWER, block=block, logprobs=True)
    choices = [chunk["choices"][0] for chunk in chunks]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert len(entries) == len(ids_of(ANSWER))
    assert [entry["token"] for entry in entries][-1] == "<|end_of_msg|>"
    first = next(choice for choice in choices if choice["delta"].get("content"))
    assert len(first["logprobs"]["content"]) > 1, "the markers before the content came along"
