"""From faults to OpenAI's shape: the status decides the type, the message's first word the field."""

import pytest
from k3compile.runtime.server.errors import ApiError, from_value_error, place_of


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (401, "authentication_error"), (404, "not_found_error"),
     (413, "invalid_request_error"), (429, "rate_limit_error"), (500, "server_error"), (503, "server_error")],
)  # fmt: skip
def test_the_status_decides_the_type(status, kind):
    assert ApiError(status, "x").body()["error"]["type"] == kind


def test_retry_after_is_a_header():
    assert ApiError(429, "x", retry_after_s=7).response().headers["retry-after"] == "7"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("top_k must be positive", "top_k"),
        ("messages[2].content[0].type is bad", "messages[2].content[0].type"),
        ("the request is too long", None),
        ("", None),
    ],
)
def test_a_message_of_ours_names_its_field_first(message, param):
    assert from_value_error(ValueError(message), ["top_k", "messages"]).param == param


def test_a_field_is_named_as_the_client_named_it():
    error = from_value_error(
        ValueError("max_tokens must be 1"), ["max_completion_tokens"], {"max_tokens": "max_completion_tokens"}
    )
    assert (error.param, error.message) == ("max_completion_tokens", "max_completion_tokens must be 1")


def test_places_are_written_as_paths():
    assert place_of(("messages", 0, "role")) == "messages[0].role"
    assert place_of(()) == ""
