"""From a checked body to ``SamplingParams``; ranges are refused under the name the client used."""

from __future__ import annotations

from collections.abc import Sequence

from ..sampling_params import MAX_LOGPROBS, SamplingParams
from .errors import ApiError, from_value_error
from .prompts import too_long
from .schema import ChatBody, Sampling
from .service import Service

MAX_STOP_STRINGS, MAX_STOP_CHARS = 16, 1024
PASSED_ON = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "min_tokens", "ignore_eos",
)  # fmt: skip


def sampling_params(
    service: Service,
    body: Sampling,
    prompts: Sequence[Sequence[int]],
    limit: str,
    field: str,
    *,
    logprobs: int | None,
    default: int | None = None,
) -> SamplingParams:
    """Parameters of a body. limit, field: the client's names of the token limit and of the prompt.

    Raises :class:`ApiError` for a value out of range, and when prompt and limit exceed the context.
    """
    given = {name: value for name in PASSED_ON if (value := getattr(body, name)) is not None}
    longest, room = max(map(len, prompts)), service.engine.max_model_len
    if longest >= room:
        raise too_long(longest, field, service)
    max_tokens = getattr(body, limit)
    if max_tokens is None:
        max_tokens = default if default is None else min(default, room - longest)
    if max_tokens is not None and longest + max_tokens > room:
        raise ApiError(
            400,
            f"{limit} is {max_tokens}, the prompt has {longest} tokens, the context is {room}: "
            f"{limit} may be at most {room - longest}",
            param=limit,
            code="context_length_exceeded",
        )
    try:
        params = SamplingParams(
            **given,
            max_tokens=max_tokens,
            logprobs=logprobs,
            logit_bias=logit_bias(body),
            stop_token_ids=tuple(body.stop_token_ids or ()),
        )
        params.check_vocabulary(service.engine.vocab_size)
    except ValueError as error:
        raise from_value_error(error, type(body).model_fields, {"max_tokens": limit}) from None
    return params


def logit_bias(body: Sampling) -> dict[int, float]:
    """Keys are token ids written as text, since they are JSON keys."""
    given = body.logit_bias or {}
    wrong = [key for key in given if not (key.isascii() and key.isdigit() and len(key) < 20)]
    if wrong:
        raise ApiError(400, f"logit_bias: {wrong[0][:50]!r} is no token id", param="logit_bias")
    return {int(key): value for key, value in given.items()}


def stop_strings(body: Sampling) -> list[str]:
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOP_STRINGS:
        raise ApiError(400, f"stop has {len(stops)} strings, at most {MAX_STOP_STRINGS}", param="stop")
    if not all(stops) or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise ApiError(400, f"stop strings must have from 1 to {MAX_STOP_CHARS} characters", param="stop")
    return stops


def top_logprobs(body: ChatBody) -> int | None:
    """How many alternatives per token a chat wants; None when it wants no log-probabilities."""
    top = body.top_logprobs
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise ApiError(400, f"top_logprobs must be from 0 to {MAX_LOGPROBS}, got {top}", param="top_logprobs")
    if top and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    return (top or 0) if body.logprobs else None
