"""The two endpoints that generate: read, check, submit, answer, whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from .answer import Piece
from .body import read_json
from .chat_shape import ChatShape
from .completion_shape import CompletionShape
from .errors import ApiError
from .job import Job, chat_job, completion_job
from .logprobs import LogprobWriter
from .prompts import chat_prompt, completion_prompts, thinking_of
from .schema import ChatBody, CompletionBody, Sampling, StreamOptions, parse
from .service import Service
from .sse import EventStream, unless_disconnected

CLIENT_CLOSED = 499  # nobody reads it; the access log does


class Shape(Protocol):
    """JSON of a job, in chunks or whole."""

    def opening(self) -> list[dict]: ...
    def chunks(self, index: int, piece: Piece) -> list[dict]: ...
    def ending(self) -> dict: ...
    def add(self, index: int, piece: Piece) -> None: ...
    def whole(self) -> dict: ...


def router(service: Service) -> APIRouter:
    """Routes that generate text with ``service``."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions", openapi_extra=described(ChatBody))
    async def chat(request: Request) -> Response:
        """Continue a conversation."""
        body = await read(service, request, ChatBody)
        thinking = thinking_of(body, service.config.effort)
        prompt = await asyncio.to_thread(chat_prompt, body, thinking, service)
        job = chat_job(service, body, prompt, thinking)
        writers = [LogprobWriter(service.tokenizer) for _ in job.answers]
        shape = ChatShape(
            job,
            service.config.model_name,
            writers,
            logprobs=bool(body.logprobs),
            reasoning=body.include_reasoning is not False,
        )
        return await respond(request, body, job, shape)

    @routes.post("/v1/completions", openapi_extra=described(CompletionBody))
    async def complete(request: Request) -> Response:
        """Continue one or more texts."""
        body = await read(service, request, CompletionBody)
        prompts, texts = await asyncio.to_thread(completion_prompts, body, service)
        job = completion_job(service, body, prompts)
        echoes = [text for text in texts for _ in range(job.n)]
        skip = body.skip_special_tokens is not False
        writers = [LogprobWriter(service.tokenizer, skip_control=skip) for _ in job.answers]
        shape = CompletionShape(
            job, service.config.model_name, writers, echoes, logprobs=body.logprobs is not None
        )
        return await respond(request, body, job, shape)

    return routes


async def read(service: Service, request: Request, kind: type[Sampling]) -> Sampling:
    """The checked body. Raises :class:`ApiError`."""
    service.check_open()
    body = await read_json(request, service.config.max_body_bytes, lambda data: parse(kind, data))
    service.check_model(body.model)
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
    return body


async def respond(request: Request, body: Sampling, job: Job, shape: Shape) -> Response:
    """The response, as the client asked for it; the job ends with it, whatever happens."""
    if body.stream:
        return EventStream(events(job, shape, body.stream_options or StreamOptions()), job.close)
    try:
        whole = await unless_disconnected(request.receive, collect(job, shape))
    finally:
        job.close()
    return Response(status_code=CLIENT_CLOSED) if whole is None else JSONResponse(whole)


async def collect(job: Job, shape: Shape) -> dict:
    async for index, piece in job.pieces():
        shape.add(index, piece)
    return shape.whole()


async def events(job: Job, shape: Shape, options: StreamOptions) -> AsyncIterator[dict | str]:
    """Chunks, then the usage if asked for, then the end mark. A failure is an event of its own."""

    def counted(chunk: dict) -> dict:
        if options.continuous_usage_stats:
            chunk["usage"] = job.usage()
        elif options.include_usage:
            chunk["usage"] = None
        return chunk

    try:
        for chunk in shape.opening():
            yield counted(chunk)
        async for index, piece in job.pieces():
            for chunk in shape.chunks(index, piece):
                yield counted(chunk)
        if options.include_usage:
            yield shape.ending()
    except ApiError as error:
        yield error.body()
    yield "[DONE]"


def described(kind: type[Sampling]) -> dict:
    """OpenAPI's description of a body that we read ourselves."""
    schema = {"schema": kind.model_json_schema()}
    return {"requestBody": {"required": True, "content": {"application/json": schema}}}
