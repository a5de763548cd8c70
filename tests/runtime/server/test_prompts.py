"""Prompts: what is too long is known before it is tokenised."""

import pytest
from fake_engine import FakeEngine
from k3compile.runtime.server import prompts
from k3compile.runtime.server.errors import ApiError
from k3compile.runtime.server.schema import ChatBody, CompletionBody, parse
from k3compile.runtime.server.server_config import ServerConfig
from k3compile.runtime.server.service import Service
from serving import says, tokenizer

SERVICE = Service(FakeEngine(says("x"), manual=True, max_model_len=100), tokenizer(), ServerConfig())


def test_a_text_that_cannot_fit_is_refused_without_tokenising(monkeypatch):
    monkeypatch.setattr(type(SERVICE.tokenizer), "encode", lambda self, text: pytest.fail("tokenised"))
    text = "x" * (100 * SERVICE.tokenizer.longest_token)
    with pytest.raises(ApiError, match="prompt: the prompt has more than 100 tokens") as error:
        prompts.completion_prompts(parse(CompletionBody, {"prompt": text}), SERVICE)
    assert error.value.code == "context_length_exceeded"
    chat = parse(ChatBody, {"messages": [{"role": "user", "content": text}]})
    with pytest.raises(ApiError, match="messages: the prompt has more than"):
        prompts.chat_prompt(chat, prompts.Thinking(True, None), SERVICE)


def test_no_text_has_fewer_tokens_than_its_length_over_the_longest_token():
    for text in ("x" * 1000, "the capital of information " * 50, " " * 500, "漢" * 100, "=" * 300):
        assert len(tokenizer().encode(text)) >= len(text) // tokenizer().longest_token


def test_developer_is_another_word_for_system():
    ids = []
    for role in ("developer", "system"):
        body = parse(ChatBody, {"messages": [{"role": role, "content": "x"}]})
        ids.append(prompts.chat_prompt(body, prompts.Thinking(False, None), SERVICE))
    assert ids[0] == ids[1]


def test_the_servers_own_effort_is_the_default():
    body = parse(ChatBody, {"messages": [{"role": "user", "content": "x"}]})
    assert prompts.thinking_of(body, "low") == prompts.Thinking(True, "low")


def test_a_prompt_is_read_back_once_however_many_choices_echo_it(monkeypatch):
    read_back = []
    monkeypatch.setattr(type(SERVICE.tokenizer), "decode", lambda self, ids: read_back.append(ids) or "text")
    body = parse(CompletionBody, {"prompt": [[1, 2], [3]], "echo": True, "n": 8})
    assert prompts.completion_prompts(body, SERVICE) == ([[1, 2], [3]], ["text", "text"])
    assert read_back == [[1, 2], [3]]
    assert prompts.completion_prompts(parse(CompletionBody, {"prompt": [1]}), SERVICE) == ([[1]], [""])
