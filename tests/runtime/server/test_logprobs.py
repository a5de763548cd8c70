"""Log-probabilities in both shapes: exact bytes, offsets, no infinity."""

import json
import math

import pytest
from k3compile.runtime.sampler import TokenLogprobs
from k3compile.runtime.server.logprobs import LogprobWriter, merged
from k3compile.runtime.text_stream import TextStream
from k3compile.runtime.tokenizer import OPEN
from serving import tokenizer

BYTES = tokenizer(256)  # every token is a byte


def entries(*tokens):
    return [TokenLogprobs(t, -1.0, ((t, -1.0), (0x61, -math.inf))) for t in tokens]


def test_a_chat_entry_has_text_bytes_and_alternatives():
    out = LogprobWriter(BYTES).chat(entries(0x62, 0xC3))
    assert out["content"][0] == {
        "token": "b", "logprob": -1.0, "bytes": [0x62],
        "top_logprobs": [
            {"token": "b", "logprob": -1.0, "bytes": [0x62]},
            {"token": "a", "logprob": -9999.0, "bytes": [0x61]},
        ],
    }  # fmt: skip
    assert out["content"][1]["token"] == "\ufffd"
    assert out["content"][1]["bytes"] == [0xC3]
    json.dumps(out, allow_nan=False)


def test_a_completion_entry_keeps_broken_tokens_apart_and_counts_whole_characters():
    writer = LogprobWriter(BYTES, offset=3)
    out = writer.completion(entries(*"aéb".encode()))
    assert out["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert out["text_offset"] == [3, 4, 4, 5]
    assert out["top_logprobs"][1] == {"bytes:\\xc3": -1.0, "a": -9999.0}
    assert writer.completion(entries(0x61))["text_offset"] == [6], "offsets go on in the next part"


def test_control_tokens_are_spelled():
    assert LogprobWriter(BYTES).chat(entries(BYTES.stop_id))["content"][0]["token"] == "<|end_of_msg|>"


@pytest.mark.parametrize("skip", [True, False])
def test_offsets_are_those_of_the_text_that_is_shown(skip):
    tokens = [
        0x61,
        BYTES.control_ids["[PAD]"],
        0x62,
        0xC3,
        BYTES.stop_id,
        0x63,
        BYTES.control_ids[OPEN],
        0x64,
    ]
    out = LogprobWriter(BYTES, skip_control=skip).completion(entries(*tokens))
    text = TextStream(BYTES, skip_control=skip).push(tokens)
    for token, at in zip(tokens, out["text_offset"]):
        if token < 0x80:
            assert text[at] == chr(token), (text, out["text_offset"])


def test_parts_are_joined():
    writer = LogprobWriter(BYTES)
    whole = LogprobWriter(BYTES).completion(entries(1, 2, 3))
    assert merged([writer.completion(entries(1)), writer.completion(entries(2, 3))]) == whole
    assert merged([]) == {}
