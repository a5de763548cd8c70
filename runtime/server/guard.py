"""In front of every route: the API key, and a count of responses by status."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError
from .metrics import Metrics

COUNTED = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/version", "/metrics"}
)  # every other path is "other": what clients make up must not become labels


class Guard:
    """ASGI middleware. Only paths under /v1 need the key; health and metrics are for probes."""

    def __init__(self, app: ASGIApp, api_key: str | None, metrics: Metrics):
        self._app = app
        self._key = api_key and api_key.encode()
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in COUNTED else "other"

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.responses.labels(path, str(message["status"])).inc()
            await send(message)

        if self._key and scope["path"].startswith("/v1") and not self._has_key(scope):
            error = ApiError(
                401, "missing or wrong API key: send it as a bearer token", code="invalid_api_key"
            )
            await error.response()(scope, receive, counting)
            return
        await self._app(scope, receive, counting)

    def _has_key(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, token = given.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._key)
