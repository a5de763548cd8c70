"""Chunks of a completion: silence while text is held, one end. Streams equal wholes: test_endpoints.py."""

from fake_engine import FakeEngine
from serving import ids_of, make_app, says, stream


def chunks_of(text, **body):
    return stream(make_app(FakeEngine(says(text))), "/v1/completions", prompt="x", **body)


def test_nothing_is_sent_while_text_is_held_back():
    chunks = chunks_of("a 漢 b STOPPED<|end_of_msg|>", stop="STOPPER", max_tokens=50)
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert all(texts[:-1])
    assert "".join(texts) == "a 漢 b STOPPED"
    assert texts[-1] == "", "the end comes alone"


def test_the_last_chunk_carries_the_end_and_the_logprobs_that_are_left():
    text = "ab<|end_of_msg|>"
    chunks = chunks_of(text, logprobs=1)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    tokens = [t for chunk in chunks for t in chunk["choices"][0]["logprobs"]["tokens"]]
    assert len(tokens) == len(ids_of(text))


def test_a_chunk_is_a_text_completion():
    assert {chunk["object"] for chunk in chunks_of("ab")} == {"text_completion"}
