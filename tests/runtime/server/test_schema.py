"""Fields are one of four kinds, and JSON types are not converted."""

import time

import pytest
from k3compile.runtime.server.errors import ApiError
from k3compile.runtime.server.schema import (
    HARMLESS,
    MAX_ITEMS,
    MAX_SALT_CHARS,
    NOT_YET,
    ChatBody,
    CompletionBody,
    parse,
)

CHAT = {"messages": [{"role": "user", "content": "x"}]}


def fault(kind, body):
    with pytest.raises(ApiError) as error:
        parse(kind, body)
    return error.value


def test_every_field_is_of_one_kind_only():
    for kind in (ChatBody, CompletionBody):
        assert not set(kind.model_fields) & (HARMLESS | set(NOT_YET))
    assert not HARMLESS & set(NOT_YET)


@pytest.mark.parametrize("name", sorted(NOT_YET))
def test_what_is_not_supported_yet_is_refused_by_name(name):
    error = fault(ChatBody, {**CHAT, name: {"type": "x"}})
    assert (error.param, error.code) == (name, "unsupported_parameter")
    assert error.message == f"{name!r} is not supported yet"
    parse(ChatBody, {**CHAT, name: None})


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_what_is_harmless_is_ignored(name):
    parse(ChatBody, {**CHAT, name: {"any": "thing"}})
    parse(CompletionBody, {"prompt": "x", name: 5})


def test_a_cache_salt_is_a_text_that_is_neither_empty_nor_endless():
    for kind, body in ((ChatBody, CHAT), (CompletionBody, {"prompt": "x"})):
        assert parse(kind, {**body, "cache_salt": "tenant 7"}).cache_salt == "tenant 7"
        for wrong in ("", "x" * (MAX_SALT_CHARS + 1), 7, ["x"]):
            assert fault(kind, {**body, "cache_salt": wrong}).param == "cache_salt"


def test_types_are_not_converted():
    for name, value in [
        ("n", "1"),
        ("n", 1.0),
        ("n", True),
        ("temperature", "1"),
        ("stream", 1),
        ("seed", None),
    ]:
        if value is None:
            parse(CompletionBody, {"prompt": "x", name: value})
        else:
            assert fault(CompletionBody, {"prompt": "x", name: value}).param == name
    assert parse(CompletionBody, {"prompt": "x", "temperature": 1}).temperature == 1


def test_several_faults_share_a_message_and_the_first_names_the_field():
    error = fault(CompletionBody, {"prompt": "x", "n": "1", "seed": "2", "top_k": "3", "min_p": "4"})
    assert error.param == "n"
    assert error.message.count(";") == 2


def test_messages_may_carry_fields_that_clients_echo():
    message = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "provider": {"a": 1}}
    assert parse(ChatBody, {"messages": [message]}).messages[0].content == "x"


@pytest.mark.parametrize("role", ["user", "tool"])
def test_who_says_nothing_is_told_that_content_is_missing(role):
    for message in ({"role": role}, {"role": role, "content": None}):
        with pytest.raises(ApiError, match=f"a message of role {role} needs content"):
            parse(ChatBody, {"messages": [message]})
    assert parse(ChatBody, {"messages": [{"role": role, "content": ""}]}).messages[0].content == ""
    assert parse(ChatBody, {"messages": [{"role": "assistant"}]}).messages[0].content is None


MANY = 200_000
CALLS = {"role": "user", "tool_calls": [{}] * MANY}


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (ChatBody, {"messages": [{}] * MANY}, "messages"),
        (ChatBody, {"messages": [{}] * MAX_ITEMS}, "messages[0].role"),
        (ChatBody, {"messages": [{"role": "user"}] * MANY}, "messages"),
        (ChatBody, {"messages": [CALLS]}, "messages[0].tool_calls"),
        (ChatBody, {"messages": [{"role": "user", "tools": [1] * MANY}]}, "messages[0].tools"),
        (ChatBody, {"stop_token_ids": ["x"] * MANY}, "stop_token_ids[0]"),
        (ChatBody, {"logit_bias": dict.fromkeys(map(str, range(MANY)), "x")}, "logit_bias"),
        (ChatBody, {"chat_template_kwargs": dict.fromkeys(map(str, range(MANY)), 1)}, "chat_template_kwargs"),
        (ChatBody, {"x" * 4_000_000: 1}, "x" * 100),
        (CompletionBody, {"prompt": [[1]] * MANY}, "prompt"),
        (CompletionBody, {"prompt": ["a"] * MANY}, "prompt"),
    ],
)
def test_a_body_of_many_faults_is_refused_at_the_first_since_all_wait_meanwhile(kind, body, param):
    body = {"messages": [{"role": "user", "content": "x"}], **body} if kind is ChatBody else body
    started = time.perf_counter()
    error = fault(kind, body)
    assert time.perf_counter() - started < 0.4
    assert error.param == param
    assert len(error.message) < 500
