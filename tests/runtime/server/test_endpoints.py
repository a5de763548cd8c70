"""Both endpoints over HTTP: shapes, streams that equal whole answers, counts, options."""

import json
import threading
import time

import pytest
from fake_engine import FakeEngine
from k3compile.runtime.chat import render
from serving import ANSWER, ask, chat, complete, ids_of, make_app, says, stream, tokenizer

PLAIN = "One two three. Grüße, 漢字!<|end_of_msg|>"


def joined(chunks, field, index=0):
    """The text of one choice of a stream."""
    parts = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                parts.append(choice["text"] if field == "text" else choice["delta"].get(field) or "")
    return "".join(parts)


def ends(chunks):
    return [
        (c["index"], c["finish_reason"]) for chunk in chunks for c in chunk["choices"] if c["finish_reason"]
    ]


def test_a_completion_has_openais_shape():
    whole = complete(make_app(FakeEngine(says(PLAIN))), prompt="Hello", max_tokens=100)
    assert whole["object"] == "text_completion"
    assert whole["model"] == "k3-test"
    assert whole["choices"] == [
        {
            "index": 0,
            "text": "One two three. Grüße, 漢字!",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    tokens = len(tokenizer().encode("Hello"))
    assert whole["usage"] == {
        "prompt_tokens": tokens,
        "completion_tokens": len(ids_of(PLAIN)),
        "total_tokens": tokens + len(ids_of(PLAIN)),
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_a_completion_stops_at_sixteen_tokens_unless_told_otherwise():
    app = make_app(FakeEngine(says("a" * 100)))
    assert complete(app, prompt="x")["usage"]["completion_tokens"] == 16
    assert complete(app, prompt="x", max_tokens=3)["choices"][0]["finish_reason"] == "length"


def test_a_chat_answer_splits_the_thoughts_from_the_content():
    engine = FakeEngine(says(ANSWER))
    whole = chat(make_app(engine))
    choice = whole["choices"][0]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Grüße!",
        "refusal": None,
        "reasoning_content": "Let me think.",
        "reasoning": "Let me think.",
    }
    assert choice["finish_reason"] == "stop"
    assert whole["object"] == "chat.completion"
    usage = whole["usage"]
    assert usage["completion_tokens"] == len(ids_of(ANSWER))
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]
    expected = tokenizer().encode_segments(render([{"role": "user", "content": "Hi"}], effort="max"))
    assert engine.seen[0].prompt == expected
    assert usage["prompt_tokens"] == len(expected)


@pytest.mark.parametrize("block", [1, 3, 100])
@pytest.mark.parametrize("options", [{}, {"stop": ["e", "ü"]}, {"max_tokens": 7}, {"logprobs": 2}, {"n": 3}])
def test_a_streamed_completion_equals_the_whole_one(block, options):
    app = make_app(FakeEngine(says(PLAIN), block=block))
    whole = complete(app, prompt="Hi", **{"max_tokens": 50, **options})
    chunks = stream(app, "/v1/completions", prompt="Hi", **{"max_tokens": 50, **options})
    assert len({chunk["id"] for chunk in chunks}) == 1
    for choice in whole["choices"]:
        index = choice["index"]
        assert joined(chunks, "text", index) == choice["text"]
        assert (index, choice["finish_reason"]) in ends(chunks)
        if choice["logprobs"]:
            mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index and c["logprobs"]]
            for key, values in choice["logprobs"].items():
                assert [v for c in mine for v in c["logprobs"][key]] == values
    assert len(ends(chunks)) == len(whole["choices"])


@pytest.mark.parametrize("block", [1, 3, 100])
@pytest.mark.parametrize(
    "options", [{}, {"stop": "ß"}, {"max_tokens": 3}, {"logprobs": True, "top_logprobs": 2}, {"n": 2}]
)
def test_a_streamed_chat_equals_the_whole_one(block, options):
    app = make_app(FakeEngine(says(ANSWER), block=block))
    whole = chat(app, **options)
    messages = [{"role": "user", "content": "Hi"}]
    chunks = stream(app, "/v1/chat/completions", messages=messages, **options)
    assert [c["choices"][0]["delta"] for c in chunks[: len(whole["choices"])]] == [
        {"role": "assistant", "content": ""} for _ in whole["choices"]
    ]
    for choice in whole["choices"]:
        index, message = choice["index"], choice["message"]
        assert joined(chunks, "content", index) == message["content"]
        assert joined(chunks, "reasoning_content", index) == message.get("reasoning_content", "")
        assert joined(chunks, "reasoning", index) == message.get("reasoning", "")
        assert (index, choice["finish_reason"]) in ends(chunks)
        if choice["logprobs"]:
            parts = [c["logprobs"]["content"] for k in chunks for c in k["choices"] if c["logprobs"]]
            assert [entry for part in parts for entry in part] == choice["logprobs"]["content"]


@pytest.mark.parametrize("limit", range(1, len(ids_of(ANSWER)) + 1, 2))
def test_a_cut_chat_answer_is_split_the_same_streamed_and_whole(limit):
    app = make_app(FakeEngine(says(ANSWER), block=4))
    whole = chat(app, max_completion_tokens=limit)
    message, usage = whole["choices"][0]["message"], whole["usage"]
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": limit}
    chunks = stream(app, "/v1/chat/completions", **body, stream_options={"include_usage": True})
    assert joined(chunks, "content") == message["content"]
    assert joined(chunks, "reasoning_content") == message.get("reasoning_content", "")
    assert chunks[-1]["usage"] == usage
    assert usage["completion_tokens"] == limit


def test_cached_tokens_are_told_by_both_endpoints_whole_and_streamed():
    engine = FakeEngine(says(ANSWER))
    engine.cached_tokens = 3
    app = make_app(engine)
    asked = {"stream_options": {"include_usage": True}}
    talk = {"messages": [{"role": "user", "content": "Hi"}]}
    told = [
        complete(app, prompt="Hi there")["usage"],
        chat(app, **talk)["usage"],
        stream(app, "/v1/completions", prompt="Hi there", **asked)[-1]["usage"],
        stream(app, "/v1/chat/completions", **talk, **asked)[-1]["usage"],
    ]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in told] == [3] * 4


def test_the_usage_chunk_comes_last_and_has_no_choices():
    app = make_app(FakeEngine(says(PLAIN)))
    chunks = stream(app, "/v1/completions", prompt="Hi", stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 16
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert all("usage" not in chunk for chunk in stream(app, "/v1/completions", prompt="Hi"))
    running = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(app, "/v1/completions", prompt="Hi", stream_options=running)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 16


def test_several_prompts_and_choices_stand_in_order_and_prompts_count_once():
    engine = FakeEngine(says(PLAIN))
    whole = complete(make_app(engine), prompt=[[5, 6], [7]], n=2, max_tokens=2, seed=10, temperature=0.5)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert [request.prompt for request in engine.seen] == [[5, 6], [5, 6], [7], [7]]
    assert [request.params.seed for request in engine.seen] == [10, 11, 10, 11]
    assert {request.params.temperature for request in engine.seen} == {0.5}
    assert whole["usage"]["prompt_tokens"] == 3
    assert whole["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("prompt", ["ab", ["ab"], [5, 6], [[5, 6]]])
def test_a_prompt_has_four_spellings(prompt):
    engine = FakeEngine(says(PLAIN))
    complete(make_app(engine), prompt=prompt)
    assert engine.seen[0].prompt == (tokenizer().encode("ab") if "ab" in prompt else [5, 6])


def test_echo_puts_the_prompt_in_front():
    app = make_app(FakeEngine(says(PLAIN)))
    prompt = "Grüße <|open|>"
    assert complete(app, prompt=prompt, echo=True, max_tokens=1)["choices"][0]["text"] == prompt + "One"[:1]
    chunks = stream(app, "/v1/completions", prompt=prompt, echo=True, max_tokens=1)
    assert joined(chunks, "text") == prompt + "O"


def test_sampling_options_reach_the_engine():
    engine = FakeEngine(says(PLAIN))
    options = {
        "temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "presence_penalty": 1,
        "frequency_penalty": -1, "repetition_penalty": 1.5, "min_tokens": 2, "ignore_eos": True, "seed": 3,
    }  # fmt: skip
    chat(make_app(engine), **options, max_tokens=4, logit_bias={"5": -2}, stop_token_ids=[9], priority=2)
    request = engine.seen[0]
    assert {name: getattr(request.params, name) for name in options} == options
    assert request.params.max_tokens == 4
    assert request.params.logit_bias == {5: -2}
    assert request.params.stop_token_ids == (9,)
    assert request.priority == 2


def test_max_completion_tokens_wins_over_max_tokens():
    engine = FakeEngine(says(PLAIN))
    chat(make_app(engine), max_tokens=3, max_completion_tokens=5)
    assert engine.seen[0].params.max_tokens == 5
    chat(make_app(engine))
    assert engine.seen[1].params.max_tokens is None


@pytest.mark.parametrize(
    ("options", "thinking", "note"),
    [
        ({}, True, "max"),
        ({"reasoning_effort": "low"}, True, "low"),
        ({"reasoning_effort": "none"}, False, None),
        ({"chat_template_kwargs": {"thinking": False}}, False, None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, None),
        ({"chat_template_kwargs": {"thinking": True, "thinking_effort": "high"}}, True, "high"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"thinking": False}}, False, None),
    ],
)
def test_thinking_and_effort_reach_the_prompt(options, thinking, note):
    engine = FakeEngine(says("Hi.<|end_of_msg|>"))
    message = chat(make_app(engine), **options)["choices"][0]["message"]
    prompt = tokenizer().decode(engine.seen[0].prompt)
    assert prompt.endswith("think<|sep|>" if thinking else "response<|sep|>")
    assert ("thinking_effort=" in prompt) == (note is not None)
    assert note is None or f"`thinking_effort={note}`" in prompt
    assert (message.get("reasoning_content"), message["content"]) == (
        ("Hi.", "") if thinking else (None, "Hi.")
    )


def test_reasoning_can_be_left_out():
    app = make_app()
    assert "reasoning" not in json.dumps(chat(app, include_reasoning=False)["choices"])
    messages = [{"role": "user", "content": "Hi"}]
    chunks = stream(app, "/v1/chat/completions", messages=messages, include_reasoning=False)
    assert "reasoning" not in json.dumps(chunks)
    assert joined(chunks, "content") == "Grüße!"


def test_history_with_tools_thoughts_and_echoed_fields_is_rendered():
    engine = FakeEngine(says(ANSWER))
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm", "refusal": None,
            "annotations": [], "audio": None, "function_call": None,
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]  # fmt: skip
    chat(make_app(engine), messages=messages)
    prompt = tokenizer().decode(engine.seen[0].prompt)
    assert 'role="system"<|sep|>Be kind.' in prompt
    assert 'call tool="f" index="1"' in prompt
    assert 'role="tool" tool="f" index="1"<|sep|>3' in prompt
    assert "think<|sep|>hm<|close|>think" in prompt


def test_a_call_the_model_makes_is_delivered_whole_and_streamed():
    output = (
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
        '<|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
    )
    app = make_app(FakeEngine(says(output)))
    choice = chat(app, reasoning_effort="none")["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    body = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": "none"}
    chunks = stream(app, "/v1/chat/completions", **body)
    calls = [c for k in chunks for c in k["choices"][0]["delta"].get("tool_calls", [])]
    assert [(c["index"], c["function"]["arguments"]) for c in calls] == [(0, '{"a": 1}')]


def test_a_stop_string_ends_the_engines_request_too():
    engine = FakeEngine(says("a" * 500), pause_s=0.002)
    whole = complete(make_app(engine), prompt="x", stop=["aaa"], max_tokens=400)
    assert whole["choices"][0] == {
        "index": 0, "text": "", "logprobs": None, "finish_reason": "stop", "stop_reason": "aaa",
    }  # fmt: skip
    assert engine.reasons == ["stop"], "the metrics must not call it a hang-up"
    assert not engine.live


def test_control_tokens_are_left_out_of_completions_unless_asked_for():
    app = make_app(FakeEngine(says("a[PAD]<|open|>b<|end_of_msg|>")))
    assert complete(app, prompt="x")["choices"][0]["text"] == "a<|open|>b"
    text = complete(app, prompt="x", skip_special_tokens=False)["choices"][0]["text"]
    assert text == "a[PAD]<|open|>b"


def test_the_stop_string_can_be_kept():
    app = make_app(FakeEngine(says(PLAIN)))
    body = {"prompt": "x", "stop": "two", "include_stop_str_in_output": True}
    assert complete(app, **body)["choices"][0]["text"] == "One two"


def test_harmless_fields_are_ignored_and_null_means_default():
    app = make_app()
    chat(app, user="me", store=True, metadata={}, parallel_tool_calls=True, service_tier="auto", tools=[])
    chat(app, tool_choice="none", response_format={"type": "text"}, temperature=None, stop=None, n=None)
    chat(app, model="k3-test", stream=False, stream_options=None, logit_bias=None)


def test_an_engine_failure_is_a_500_or_an_error_event():
    engine = FakeEngine(says(PLAIN))
    app = make_app(engine)
    engine.fail_next = "out of luck"
    error = complete(app, 500, prompt="x")["error"]
    assert error["type"] == "server_error"
    assert "out of luck" in error["message"]
    engine.fail_next = "out of luck"
    chunks = stream(app, "/v1/completions", prompt="x")
    assert "out of luck" in chunks[-1]["error"]["message"]
    assert complete(app, prompt="x")["choices"][0]["text"], "the next request works"


@pytest.mark.parametrize("streamed", [False, True])
def test_an_engine_that_ends_under_a_request_is_a_503_or_an_error_event(streamed):
    engine = FakeEngine(says(PLAIN), manual=True)
    app = make_app(engine)

    def end():
        while not engine.live:
            time.sleep(0.01)
        engine.alive = False
        engine.fail("rank 1 is gone")

    ending = threading.Thread(target=end)
    ending.start()
    response = ask(app, "POST", "/v1/completions", json={"prompt": "x", "stream": streamed})
    ending.join()
    assert "the engine failed: rank 1 is gone" in response.text
    if not streamed:
        assert response.status_code == 503
        assert "retry-after" in response.headers


def test_a_full_queue_is_a_429_and_leaves_nothing_behind():
    engine = FakeEngine(says(PLAIN), max_waiting=2, manual=True)
    response = ask(make_app(engine, retry_after_s=3), "POST", "/v1/completions", json={"prompt": "x", "n": 3})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert not engine.live


def test_a_closed_engine_is_a_503():
    engine = FakeEngine(says(PLAIN))
    app = make_app(engine)
    engine.alive = False
    response = ask(app, "POST", "/v1/completions", json={"prompt": "x"})
    assert response.status_code == 503
    assert "retry-after" in response.headers
