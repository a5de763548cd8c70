"""Bad requests: each is a 4xx that names its field, and nobody else notices."""

import json
import os
import threading
import time

import httpx
import pytest
from fake_engine import FakeEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import LiveServer, ask, chat, complete, make_app, says, wait_until

FULL = bool(os.environ.get("K3_ACCEPT"))  # every check at its full count
APP = make_app(FakeEngine(says("fine<|end_of_msg|>")))
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BOTH = [
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [1024]}, "stop_token_ids"),
    ({"stop_token_ids": [2**70]}, "stop_token_ids"),
    ({"stop_token_ids": list(range(1000)) * 5}, "stop_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
    ({"logit_bias": {"1024": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"cat": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1000}}, "logit_bias"),
    ({"logit_bias": {"5": "x"}}, "logit_bias.5"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 2**64 - 1, "n": 2}, "seed"),
    ({"seed": 1.5}, "seed"),
    *(({name: 10**4000}, name) for name in ("seed", "n", "top_k", "min_tokens", "max_tokens", "temperature")),
    ({"logit_bias": {"5": 10**4000}}, "logit_bias.5"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 50, "max_tokens": 5}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 10**6}, "n"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "x" * 2000}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": [5]}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"priority": 2**40}, "priority"),
    ({"ignore_eos": "no"}, "ignore_eos"),
    ({"model": 5}, "model"),
    ({"temprature": 1}, "temprature"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"guided_json": {}}, None),
    ({"guided_json": {"type": "object"}}, "guided_json"),
]
ONLY_CHAT = [
    ({"messages": []}, "messages"),
    ({"reasoning_effort": "x" * 5000}, "reasoning_effort"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "system", "tools": [{}]}]}, "messages[0].tools"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    ({"top_logprobs": 10**6, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": 5}, "logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"reasoning_effort": "medium"}, "reasoning_effort"),
    ({"reasoning_effort": 5}, "reasoning_effort"),
    ({"chat_template_kwargs": {"thinking": "no"}}, "chat_template_kwargs.thinking"),
    ({"chat_template_kwargs": {"thinkin": True}}, "chat_template_kwargs.thinkin"),
    ({"chat_template_kwargs": {"thinking_effort": "medium"}}, "chat_template_kwargs.thinking_effort"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"web_search_options": {"a": 1}}, "web_search_options"),
    ({"prompt": "x"}, "prompt"),
    ({"messages": [{"role": "user", "content": "a b " * 3000}]}, "messages"),
]
ONLY_COMPLETIONS = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["x", ""]}, "prompt"),
    ({"prompt": ["x", 5]}, "prompt"),
    ({"prompt": [[5], "x"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [1024]}, "prompt"),
    ({"prompt": [2**80]}, "prompt"),
    ({"prompt": [5] * 2048}, "prompt"),
    ({"prompt": "a b " * 3000}, "prompt"),
    ({"prompt": ["x"] * 129}, "n"),
    ({"prompt": ["x"] * 100, "n": 2}, "n"),
    ({"logprobs": 10**6}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": True, "logprobs": 1}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"messages": []}, "messages"),
]
CASES = [(path, *case) for case in BOTH for path in (CHAT, COMPLETIONS)]
CASES += [(CHAT, *case) for case in ONLY_CHAT] + [(COMPLETIONS, *case) for case in ONLY_COMPLETIONS]


def good(path):
    return {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}


@pytest.mark.parametrize(("path", "change", "param"), CASES, ids=lambda value: str(value)[:60])
def test_a_bad_value_is_a_400_that_names_its_field(path, change, param):
    response = ask(APP, "POST", path, json={**good(path), **change})
    if param is None:
        assert response.status_code == 200
        return
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param.split(".")[0].split("[")[0] in error["message"]
    assert len(error["message"]) < 1000
    assert ask(APP, "POST", path, json=good(path)).status_code == 200, "the next request works"


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(literal):
    body = f'{{"prompt": "x", "temperature": {literal}}}'
    error = ask(APP, "POST", COMPLETIONS, content=body).json()["error"]
    assert error["param"] == "temperature"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nonsense", b'{"prompt": "x"', b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}',
     b"[" * 100_000, b'{"prompt":' * 50_000, b'{"a": ' + b"9" * 5000 + b"}"],
    ids=lambda body: repr(body[:20]),
)  # fmt: skip
def test_what_is_no_json_is_a_400(body):
    for path in (CHAT, COMPLETIONS):
        response = ask(APP, "POST", path, content=body)
        assert response.status_code == 400
        assert response.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"5", b"[]", b'"x"', b"null", b"true"])
def test_json_that_is_no_object_is_a_400(body):
    error = ask(APP, "POST", CHAT, content=body).json()["error"]
    assert "must be a JSON object" in error["message"]


def test_another_model_is_a_404():
    for path in (CHAT, COMPLETIONS):
        response = ask(APP, "POST", path, json={**good(path), "model": "gpt-9"})
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"


def test_an_unknown_field_is_refused_with_the_nearest_name():
    error = chat(APP, 400, temprature=1)["error"]
    assert error["message"] == "'temprature' is not a field of this request, did you mean 'temperature'?"


def test_medium_effort_is_refused_with_what_is_allowed():
    error = chat(APP, 400, reasoning_effort="medium")["error"]
    assert error["message"] == (
        "reasoning_effort is 'medium'; K3 was trained on low, high, max; none turns thinking off"
    )


def test_the_limit_that_is_left_is_told():
    error = complete(APP, 400, prompt=[5] * 2000, max_tokens=100)["error"]
    assert error["code"] == "context_length_exceeded"
    assert "may be at most 48" in error["message"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = sorted({name for _, change, _ in CASES for name in change})
VALUES = JSON | st.sampled_from([change[name] for _, change, _ in CASES for name in change])
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool"])},
    optional={"content": JSON, "name": JSON, "tool_calls": JSON, "tool_call_id": JSON, "reasoning": JSON},
)


@pytest.mark.slow
@given(
    path=st.sampled_from([CHAT, COMPLETIONS]),
    change=st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), VALUES, max_size=4),
    messages=st.none() | st.lists(MESSAGE, max_size=3),
)
@settings(max_examples=5000 if FULL else 250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_body_is_ever_a_5xx(path, change, messages):
    body = {**good(path), **change}
    if path == CHAT and messages is not None:
        body["messages"] = messages
    if body.get("max_tokens") is None:
        body["max_tokens"] = 4
    response = ask(APP, "POST", path, content=json.dumps(body))
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_large_body_is_a_413_and_health_answers_all_the_time():
    with LiveServer(FakeEngine(says("fine<|end_of_msg|>"))) as live, httpx.Client(timeout=30) as client:
        slowest = [0.0]
        done = threading.Event()

        def probe():
            with httpx.Client(timeout=30) as own:
                while not done.is_set():
                    start = time.perf_counter()
                    assert own.get(live.url.replace("/v1", "/health")).status_code == 200
                    slowest[0] = max(slowest[0], time.perf_counter() - start)

        prober = threading.Thread(target=probe)
        prober.start()
        try:
            huge = client.post(
                live.url + "/completions", content=b'{"prompt": "' + b"a b " * 6_500_000 + b'"}'
            )
            assert huge.status_code == 413
            assert "larger than 16777216 bytes" in huge.json()["error"]["message"]
            large = client.post(live.url + "/completions", json={"prompt": "a b " * 3_500_000})
            assert large.status_code == 400
            assert large.json()["error"]["code"] == "context_length_exceeded"
            ids = client.post(live.url + "/completions", json={"prompt": [5] * 2_000_000})
            assert ids.status_code == 400
        finally:
            done.set()
            prober.join()
        assert slowest[0] < 1.0


def test_a_bad_request_changes_nothing_for_a_stream_beside_it():
    engine = FakeEngine(says("a" * 300), pause_s=0.005)
    with LiveServer(engine) as live, httpx.Client(timeout=30) as client:
        body = {"prompt": "x", "max_tokens": 100, "stream": True}
        with client.stream("POST", live.url + "/completions", json=body) as running:
            wait_until(lambda: engine.live)
            for bad in (
                {"stop_token_ids": [1024]},
                {"logit_bias": {"9999": 1}},
                {"top_k": -1},
                {"prompt": ""},
            ):
                assert httpx.post(live.url + "/completions", json={"prompt": "x", **bad}).status_code == 400
            lines = [json.loads(line[6:]) for line in running.iter_lines() if line.startswith("data: {")]
        assert "".join(line["choices"][0]["text"] for line in lines) == "a" * 100
