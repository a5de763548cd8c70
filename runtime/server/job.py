"""An HTTP request as engine requests and growing answers.

prompt 0 -> choice 0 .. n-1,  prompt 1 -> choice n .. 2n-1, ...       choice i of a prompt: seed + i
"""

from __future__ import annotations

import time
import uuid
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

from ..request import Request
from ..sampling_params import SamplingParams
from ..text_stream import TextStream
from .answer import Answer, ChatReader, Piece, Reader, TextReader
from .errors import ApiError, from_value_error
from .generation import Generation
from .prompts import Thinking
from .sampling import sampling_params, stop_strings, top_logprobs
from .schema import ChatBody, CompletionBody, Sampling
from .service import Service


@dataclass
class Job:
    """An HTTP request that the engine works on. ``prompts`` are token ids; ``n`` choices for each."""

    id: str
    prompts: list[list[int]]
    n: int
    answers: list[Answer]
    generation: Generation
    created: int = field(default_factory=lambda: int(time.time()))

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """What each update adds, with the place of its answer, until all have ended.

        Raises :class:`ApiError` when the engine gives one up: 503 when it takes no others either, else 500.
        """
        async for index, update in self.generation.updates():
            answer = self.answers[index]
            piece = answer.take(update)
            if answer.finish_reason == "abort":
                raise ApiError(503, "the server is stopping", retry_after_s=1)
            if answer.finish_reason == "error":
                raise self.failure(f"the engine failed: {answer.error}")
            if answer.finish_reason is not None:
                self.generation.stop(index)
            yield index, piece

    def failure(self, said: str) -> ApiError:
        """An error of the engine, which may do better next time, or has ended and only another server may."""
        return ApiError(503, said, retry_after_s=1) if self.generation.over else ApiError(500, said)

    def close(self) -> None:
        """Let go of whatever still runs."""
        self.generation.close()

    def usage(self) -> dict:
        """Counts so far, each prompt once however many choices it has."""
        prompt = sum(map(len, self.prompts))
        completion = sum(answer.num_tokens for answer in self.answers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(a.cached_tokens for a in self.answers[:: self.n])},
            "completion_tokens_details": {
                "reasoning_tokens": sum(answer.reader.reasoning_tokens for answer in self.answers)
            },
        }


def make_job(
    service: Service,
    body: Sampling,
    kind: str,
    prompts: list[list[int]],
    params: SamplingParams,
    reader: Callable[[], Reader],
) -> Job:
    """Submit every choice. kind: prefix of the id. Raises :class:`ApiError`."""
    n = 1 if body.n is None else body.n
    most = service.config.max_choices
    if not 1 <= n <= most or n * len(prompts) > most:
        raise ApiError(
            400, f"n is {n} for {len(prompts)} prompts: from 1 to {most} answers a request", param="n"
        )
    job_id = f"{kind}-{uuid.uuid4().hex}"
    requests, answers = [], []
    try:
        for prompt in prompts:
            tokens = array("q", prompt)  # copied by each choice at once, where a list is read item by item
            for choice in range(n):
                own = params if params.seed is None else replace(params, seed=params.seed + choice)
                name = f"{job_id}-{len(requests)}"
                requests.append(
                    Request(name, tokens, own, priority=body.priority or 0, cache_salt=body.cache_salt or "")
                )
                answers.append(Answer(reader(), params.stop_token_ids))
        return Job(job_id, prompts, n, answers, service.generate(requests))
    except ValueError as error:
        raise from_value_error(error, type(body).model_fields) from None


def chat_job(service: Service, body: ChatBody, prompt: list[int], thinking: Thinking) -> Job:
    """Submit a chat; ``prompt`` is what :func:`chat_prompt` made. Raises :class:`ApiError`."""
    top = top_logprobs(body)
    limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    params = sampling_params(service, body, [prompt], limit, "messages", logprobs=top)
    stop, include = stop_strings(body), bool(body.include_stop_str_in_output)

    def reader() -> ChatReader:
        return ChatReader(service.tokenizer, thinking.on, stop, include, params.min_tokens)

    return make_job(service, body, "chatcmpl", [prompt], params, reader)


def completion_job(service: Service, body: CompletionBody, prompts: list[list[int]]) -> Job:
    """Submit completions of ``prompts``. Raises :class:`ApiError`."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, "best_of other than n is not supported", param="best_of")
    if body.echo and body.logprobs is not None:
        raise ApiError(400, "echo together with logprobs is not supported yet", param="echo")
    params = sampling_params(
        service, body, prompts, "max_tokens", "prompt", logprobs=body.logprobs, default=16
    )
    stop, include = stop_strings(body), bool(body.include_stop_str_in_output)
    skip = body.skip_special_tokens is not False

    def reader() -> TextReader:
        return TextReader(
            TextStream(
                service.tokenizer,
                stop,
                include_stop=include,
                skip_control=skip,
                min_tokens=params.min_tokens,
            )
        )

    return make_job(service, body, "cmpl", prompts, params, reader)
