"""From a checked body to prompts as token ids. Long texts take long to tokenise: call these in a thread."""

from __future__ import annotations

from dataclasses import dataclass

from ..chat import render
from ..chat_notes import check_effort
from .errors import ApiError, from_value_error
from .schema import ChatBody, CompletionBody
from .service import Service


@dataclass(frozen=True)
class Thinking:
    """How a chat is to be thought about."""

    on: bool
    effort: str | None


def thinking_of(body: ChatBody, default_effort: str) -> Thinking:
    """Effort "none" turns thinking off, and so does thinking (or enable_thinking) in chat_template_kwargs.

    Raises :class:`ApiError` for an effort the model was not trained on.
    """
    extra = body.chat_template_kwargs
    flags = [extra.thinking, extra.enable_thinking] if extra else []
    said = next((flag for flag in flags if flag is not None), None)
    name, effort = "reasoning_effort", body.reasoning_effort
    if effort is None and extra and extra.thinking_effort is not None:
        name, effort = "chat_template_kwargs.thinking_effort", extra.thinking_effort
    if effort == "none":
        return Thinking(False, None)
    if effort is not None:
        try:
            check_effort(effort)
        except ValueError as error:
            message = str(error).replace("reasoning_effort", name)
            raise ApiError(400, f"{message}; none turns thinking off", param=name) from None
    return Thinking(said is not False, effort or default_effort)


def chat_prompt(body: ChatBody, thinking: Thinking, service: Service) -> list[int]:
    """Ids of the conversation."""
    messages = [message.model_dump(exclude_none=True) for message in body.messages]
    for index, message in enumerate(messages):
        if message.get("tools"):
            field = f"messages[{index}].tools"
            raise ApiError(400, f"{field!r} is not supported yet", param=field, code="unsupported_parameter")
        if message["role"] == "developer":
            message["role"] = "system"
    try:
        segments = render(messages, thinking=thinking.on, effort=thinking.effort)
    except ValueError as error:
        raise from_value_error(error, ["messages"]) from None
    check_length(sum(len(segment.text) for segment in segments), "messages", service)
    return service.tokenizer.encode_segments(segments)


def completion_prompts(body: CompletionBody, service: Service) -> tuple[list[list[int]], list[str]]:
    """Ids of every prompt, and the text of each that the answer begins with: "" without ``echo``."""
    prompts = body.prompt
    if isinstance(prompts, str) or isinstance(prompts[0], int):
        prompts = [prompts]
    ids = []
    for prompt in prompts:
        if isinstance(prompt, str):
            check_length(len(prompt), "prompt", service)
            prompt = service.tokenizer.encode(prompt)
        elif wrong := [token for token in prompt if not 0 <= token < service.engine.vocab_size]:
            size = service.engine.vocab_size
            raise ApiError(
                400, f"prompt holds {wrong[:3]}, token ids are from 0 to {size - 1}", param="prompt"
            )
        if not prompt:
            raise ApiError(400, "prompt is empty: a request needs at least one token", param="prompt")
        ids.append(prompt)
    return ids, [service.tokenizer.decode(prompt) if body.echo else "" for prompt in ids]


def check_length(num_chars: int, field: str, service: Service) -> None:
    """Refuse a text that cannot fit whatever its tokens are, before time is spent on it."""
    at_least = num_chars // service.tokenizer.longest_token
    if at_least >= service.engine.max_model_len:
        raise too_long(f"more than {at_least}", field, service)


def too_long(tokens: int | str, field: str, service: Service) -> ApiError:
    return ApiError(
        400,
        f"{field}: the prompt has {tokens} tokens, and with one to generate it must fit "
        f"into the context of {service.engine.max_model_len}",
        param=field,
        code="context_length_exceeded",
    )
