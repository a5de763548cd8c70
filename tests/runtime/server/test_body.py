"""Bodies: bounded, decoded, refused with a reason. What is inside them is test_endpoints_hostile's matter."""

import asyncio
import json
import time

import pytest
from k3compile.runtime.server.body import INLINE_BYTES, MAX_NESTED, read_json
from k3compile.runtime.server.errors import ApiError
from starlette.requests import Request


def read(parts, limit=1000):
    """Decode a body that arrives in parts; also how many parts were taken."""
    waiting = list(parts)

    async def receive():
        body = waiting.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(waiting)}

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    try:
        return asyncio.run(read_json(request, limit)), len(parts) - len(waiting)
    except ApiError as error:
        return error, len(parts) - len(waiting)


def test_parts_are_joined():
    assert read([b'{"a"', b": [1, ", b"2]}"])[0] == {"a": [1, 2]}


def test_a_large_body_is_decoded_too():
    text = "x" * (2 * INLINE_BYTES)
    assert read([b'"' + text.encode() + b'"'], limit=10**6)[0] == text


def test_a_body_at_the_limit_is_taken_and_one_byte_more_is_not():
    assert read([b'"' + b"x" * 998 + b'"'])[0] == "x" * 998
    error, _ = read([b'"' + b"x" * 999 + b'"'])
    assert (error.status, error.code) == (413, "request_too_large")


def test_a_body_that_never_ends_is_not_read_for_ever():
    error, taken = read([b"x" * 500] * 1000)
    assert error.status == 413
    assert taken == 9


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 10_000])
def test_no_json_is_a_400(body):
    error, _ = read([body], limit=10**6)
    assert (error.status, error.code) == (400, "invalid_json")


@pytest.mark.parametrize("unit", [b"[1],", b"{},", b'[["[\\"["]],'])
def test_more_lists_than_can_be_decoded_at_once_are_a_400(unit):
    error, _ = read([b"[" + unit * MAX_NESTED + b"1]"], limit=10**8)
    assert (error.status, error.code) == (400, "invalid_json")
    assert error.message == f"the body holds more than {MAX_NESTED} lists and objects"


@pytest.mark.parametrize("text", ["[{" * MAX_NESTED, '\\\\"[' * (MAX_NESTED + 1)])
def test_brackets_inside_a_text_are_not_lists(text):
    body = json.dumps([text]).encode()
    assert read([body], limit=10**8)[0] == [text]


def test_an_unfinished_text_of_quotes_is_looked_at_once():
    started = time.perf_counter()
    error, _ = read([b"[" * (MAX_NESTED + 1) + b'"' + b'\\"' * 2_000_000], limit=10**8)
    assert time.perf_counter() - started < 2.0
    assert error.status == 400
