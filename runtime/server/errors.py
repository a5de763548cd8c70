"""Everything that goes wrong, in the shape OpenAI's clients read.

{"error": {"message": "temperature must be ...", "type": "invalid_request_error",
           "param": "temperature", "code": null}}
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

log = logging.getLogger(__name__)

MAX_MESSAGE = 900  # characters

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """An answer other than 200. ``param`` is the field at fault, ``code`` a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ):
        if len(message) > MAX_MESSAGE:  # a client's own value may be megabytes
            message = message[:MAX_MESSAGE] + " ..."
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"
        if status == 408:
            self.headers["Connection"] = "close"  # the rest of the body would be read as the next request

    def body(self) -> dict:
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def from_value_error(
    error: ValueError, fields: Iterable[str], renamed: dict[str, str] | None = None
) -> ApiError:
    """A 400 for a message of ours, which begins with the field it is about.

    renamed: names of our own that the client knows under another one.
    """
    message = str(error)
    for ours, theirs in (renamed or {}).items():
        message = re.sub(rf"^{ours}\b", theirs, message)
    place = re.match(r"\w+(?:\[\d+\]|\.\w+)*", message)
    root = re.match(r"\w+", message)
    param = place[0] if place and root[0] in set(fields) else None
    return ApiError(400, message, param=param)


def from_validation(error: ValidationError) -> ApiError:
    """A 400 for a body of the wrong shape: the first fault names the field, the message has up to three."""
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    places = [place_of(fault["loc"]) for fault in faults]
    message = "; ".join(f"{place}: {fault['msg']}" for place, fault in list(zip(places, faults))[:3])
    return ApiError(400, message, param=places[0] or None)


def place_of(loc: tuple[int | str, ...]) -> str:
    """("messages", 0, "role") -> messages[0].role"""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return text.removeprefix(".")


def install(app: FastAPI) -> None:
    """Give every error this shape, those of the framework and our own faults included."""

    @app.exception_handler(ApiError)
    async def ours(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(HTTPException)
    async def of_the_framework(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        answer = ApiError(error.status_code, message).response()
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        log.exception("%s %s failed", request.method, request.url.path, exc_info=error)
        return ApiError(500, "internal error; the server's log has the details").response()
