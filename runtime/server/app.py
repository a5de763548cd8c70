"""The HTTP application: OpenAI's endpoints for one model, and an operator's for one process."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from ..tokenizer import Tokenizer
from . import endpoints, errors
from .guard import Guard
from .metrics import Metrics
from .server_config import ServerConfig
from .service import ServedEngine, Service


def build_app(
    engine: ServedEngine, tokenizer: Tokenizer, config: ServerConfig, version: str = "0"
) -> FastAPI:
    """The application, with ``app.state.service``. Starting and stopping the engine is the caller's task."""
    service = Service(engine, tokenizer, config)
    metrics = Metrics(service)
    app = FastAPI(title="k3compile", version=version, docs_url=None, redoc_url=None)
    app.state.service = service
    errors.install(app)
    app.include_router(endpoints.router(service))
    add_operations(app, service, metrics, version)
    app.add_middleware(Guard, api_key=config.api_key, metrics=metrics)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: object, error: ClientDisconnect) -> Response:
        """The client hung up while it was still sending its body."""
        return Response(status_code=endpoints.CLIENT_CLOSED)

    return app


def add_operations(app: FastAPI, service: Service, metrics: Metrics, version: str) -> None:
    """Models, health, version and metrics."""

    @app.get("/v1/models")
    async def models() -> dict:
        return {"object": "list", "data": [model_card(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict:
        service.check_model(name)
        return model_card(service)

    @app.get("/health")
    async def health() -> Response:
        trouble = service.health()
        if trouble:
            return JSONResponse({"status": trouble}, status_code=503)
        return JSONResponse({"status": "ok"})

    @app.get("/version")
    async def show_version() -> dict:
        return {"version": version}

    @app.get("/metrics")
    async def show_metrics() -> Response:
        text = await asyncio.to_thread(metrics.text)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def model_card(service: Service) -> dict:
    return {
        "id": service.config.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "k3compile",
        "max_model_len": service.engine.max_model_len,
    }
