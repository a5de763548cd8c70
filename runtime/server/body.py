"""Read a request's body within bounds and decode its JSON without stopping the event loop."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request

from .errors import ApiError

INLINE_BYTES = 64 << 10  # below this, decoding takes less time than handing it to a thread


async def read_json(request: Request, max_bytes: int) -> Any:
    """The decoded body. Raises :class:`ApiError` 413 when it is too long, 400 when it is no JSON."""
    data = await read_body(request, max_bytes)
    try:
        return from_json(data) if len(data) <= INLINE_BYTES else await asyncio.to_thread(from_json, data)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None


async def read_body(request: Request, max_bytes: int) -> bytes:
    """All bytes, or 413. A body somewhat too long is read to its end first, so that the client, still
    writing, gets to see the answer.
    """
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
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
