"""Read a request's body within bounds and decode its JSON without stopping the event loop."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from pydantic_core import from_json
from starlette.requests import Request

from .errors import ApiError

T = TypeVar("T")
INLINE_BYTES = 64 << 10  # below this, decoding takes less time than handing it to a thread
PATIENCE_S = 30.0  # for the next part of a body
MAX_NESTED = 1 << 18  # lists and objects; decoding millions stops every thread for seconds
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # one without an end reaches to the end


async def read_json(request: Request, max_bytes: int, check: Callable[[Any], T] = lambda data: data) -> T:
    """``check`` of the decoded body, both in a thread when it is long.

    Raises :class:`ApiError` 413 when it is too long, 400 when it is no JSON, and what ``check`` raises.
    """
    data = await read_body(request, max_bytes)

    def work() -> T:
        return check(decode(data))

    return work() if len(data) <= INLINE_BYTES else await asyncio.to_thread(work)


def decode(data: bytes) -> Any:
    """JSON of at most :data:`MAX_NESTED` lists and objects; raises :class:`ApiError` 400."""
    if nested(data) > MAX_NESTED and nested(_STRING.sub(b"", data)) > MAX_NESTED:
        raise ApiError(400, f"the body holds more than {MAX_NESTED} lists and objects", code="invalid_json")
    try:
        return from_json(data)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None


def nested(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """All bytes, or 413. A body somewhat too long is read to its end first, so that the client, still
    writing, gets to see the answer. Or 408, where a client stops writing and holds its connection.
    """
    parts: list[bytes] = []
    size = 0
    async for part in in_time(request.stream()):
        size += len(part)
        if size <= max_bytes:
            parts.append(part)
        elif size > 4 * max_bytes:
            break
        else:
            parts.clear()
    if size > max_bytes:
        raise ApiError(413, f"the body is larger than {max_bytes} bytes", code="request_too_large")
    return b"".join(parts)


async def in_time(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The parts of ``stream``, or 408 when one takes longer than :data:`PATIENCE_S`."""
    while True:
        try:
            part = await asyncio.wait_for(anext(stream, None), PATIENCE_S)
        except TimeoutError:
            said = f"the body did not go on for {PATIENCE_S:g} s: send the whole of it"
            raise ApiError(408, said, code="request_timeout") from None
        if part is None:
            return
        yield part
