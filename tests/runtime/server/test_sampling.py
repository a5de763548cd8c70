"""Bodies become SamplingParams; limits are checked against the context of the longest prompt."""

import pytest
from fake_engine import FakeEngine
from k3compile.runtime.server.errors import ApiError
from k3compile.runtime.server.sampling import logit_bias, sampling_params, stop_strings, top_logprobs
from k3compile.runtime.server.schema import ChatBody, CompletionBody, parse
from k3compile.runtime.server.server_config import ServerConfig
from k3compile.runtime.server.service import Service
from serving import says, tokenizer

SERVICE = Service(FakeEngine(says("x"), manual=True, max_model_len=100), tokenizer(), ServerConfig())


def body(**fields):
    return parse(CompletionBody, {"prompt": "x", **fields})


def params(prompts, **fields):
    return sampling_params(
        SERVICE, body(**fields), prompts, "max_tokens", "prompt", logprobs=None, default=16
    )


def test_the_default_limit_shrinks_to_the_room_that_is_left():
    assert params([[1] * 10]).max_tokens == 16
    assert params([[1] * 90, [1]]).max_tokens == 10


def test_a_limit_that_just_fits_is_taken_and_one_more_is_not():
    assert params([[1] * 90], max_tokens=10).max_tokens == 10
    with pytest.raises(ApiError, match="max_tokens may be at most 10"):
        params([[1] * 90], max_tokens=11)


def test_a_prompt_as_long_as_the_context_is_refused():
    assert params([[1] * 99]).max_tokens == 1
    with pytest.raises(ApiError, match="prompt: the prompt has 100 tokens"):
        params([[1] * 100])


def test_biases_and_stops_are_read():
    assert logit_bias(body(logit_bias={"7": -1.5})) == {7: -1.5}
    assert stop_strings(body(stop="x")) == ["x"]
    assert stop_strings(body(stop=["x", "y"])) == ["x", "y"]
    assert stop_strings(body()) == []


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"top_logprobs": 0}, None),
     ({"logprobs": True, "top_logprobs": 3}, 3)],
)  # fmt: skip
def test_a_chat_asks_for_alternatives_in_two_fields(fields, expected):
    messages = [{"role": "user", "content": "x"}]
    assert top_logprobs(parse(ChatBody, {"messages": messages, **fields})) == expected
