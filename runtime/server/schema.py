"""The bodies of /v1/completions and /v1/chat/completions: names and JSON types.

Ranges are not checked here but by ``SamplingParams``, which the offline door uses too. A field is one of
four kinds: it does something (declared below), it is harmless and ignored, it is known but not supported
yet (refused by its name unless it says "off"), or it is unknown and refused with the nearest known name.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from .errors import ApiError, from_validation

Role = Literal["system", "developer", "user", "assistant", "tool"]
Prompt = str | list[str] | list[int] | list[list[int]]
Body = TypeVar("Body", bound="Sampling")

MAX_ITEMS = 1 << 14  # messages, calls, prompts: far above any use, and checked in a tenth of a second
MAX_BIASES = 1024
MAX_SALT_CHARS = 1024

HARMLESS = frozenset(
    {
        "user", "store", "metadata", "parallel_tool_calls", "service_tier", "safety_identifier", "verbosity",
        "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "request_id",
        "spaces_between_special_tokens", "add_generation_prompt", "add_special_tokens",
    }
)  # fmt: skip
OFF: tuple[Any, ...] = (None, False, [], {}, "", "none")
NOT_YET: dict[str, tuple[Any, ...]] = {  # field -> the values that ask for nothing
    **dict.fromkeys(
        (
            "tools", "tool_choice", "functions", "function_call", "audio", "prediction", "web_search_options",
            "suffix", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
            "bad_words", "allowed_token_ids", "prompt_logprobs", "truncate_prompt_tokens", "use_beam_search",
            "continue_final_message", "documents", "chat_template", "logits_processors",
            "mm_processor_kwargs", "moderation",
        ),
        OFF,
    ),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
}  # fmt: skip


def few(value: Any) -> Any:
    """Refuse a long list before any of it is checked: everything else waits meanwhile."""
    if isinstance(value, list) and len(value) > MAX_ITEMS:
        raise ValueError(f"holds {len(value)} items, at most {MAX_ITEMS}")
    return value


Item = TypeVar("Item")
Few = Annotated[list[Item], Field(fail_fast=True), BeforeValidator(few)]  # one fault, not a list of millions


class Model(BaseModel):
    """JSON types are taken as they are: "1" is no number and 1 is no text."""

    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(Model):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ChatTemplateKwargs(Model):
    model_config = ConfigDict(strict=True, extra="forbid")

    thinking: bool | None = None
    enable_thinking: bool | None = None
    thinking_effort: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _few(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > 100:
            raise ValueError(f"has {len(value)} entries, known are {', '.join(cls.model_fields)}")
        return value


class FunctionIn(Model):
    name: str
    arguments: str | None = None


class ToolCallIn(Model):
    """A call of an earlier answer, as we or another server gave it."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionIn


class Message(Model):
    """A message of the conversation. Fields that a client echoes from our answers are ignored."""

    role: Role
    content: str | list[dict] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Few[ToolCallIn] | None = None
    tool_call_id: str | None = None
    tools: Few[dict] | None = None

    @field_validator("content", mode="plain")
    @classmethod
    def _content(cls, value: Any) -> Any:
        parts = value if isinstance(value, list) else []
        if not (value is None or isinstance(value, (str, list))) or not all(
            isinstance(p, dict) for p in parts
        ):
            raise ValueError("must be a string or a list of parts")
        return value

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.role in ("user", "tool") and self.content is None:
            raise ValueError(f"a message of role {self.role} needs content")
        return self


class Sampling(Model):
    """What both endpoints share. None means the default, as if the field were absent."""

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=MAX_SALT_CHARS)
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _logit_bias(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_BIASES:
            raise ValueError(f"has {len(value)} entries, at most {MAX_BIASES}")
        return value

    @field_validator("stop", mode="plain")
    @classmethod
    def _stop(cls, value: Any) -> Any:
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, list) and all(isinstance(stop, str) for stop in value):
            return value
        raise ValueError("must be a string or a list of strings")


class CompletionBody(Sampling):
    """/v1/completions"""

    prompt: Prompt
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    skip_special_tokens: bool | None = None

    @field_validator("prompt", mode="plain")
    @classmethod
    def _prompt(cls, value: Any) -> Any:
        if isinstance(value, str) or _all_of(value, int):
            return value
        if isinstance(value, list) and len(value) > MAX_ITEMS and type(value[0]) in (str, list):
            raise ValueError(f"holds {len(value)} prompts, at most {MAX_ITEMS}")
        lists = isinstance(value, list) and value and all(_all_of(ids, int) for ids in value)
        if lists or _all_of(value, str):
            return value
        raise ValueError(
            "must be a text, a list of texts, a list of token ids or a list of such lists, not empty"
        )


class ChatBody(Sampling):
    """/v1/chat/completions"""

    messages: Few[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: ChatTemplateKwargs | None = None


def parse(kind: type[Body], data: Any) -> Body:
    """Check a decoded body. Raises :class:`ApiError` 400 that names the field."""
    if not isinstance(data, dict):
        raise ApiError(400, f"the body must be a JSON object, not {_json_type(data)}")
    for name, value in data.items():
        if name in kind.model_fields or name in HARMLESS:
            continue
        if name not in NOT_YET:
            near = get_close_matches(name[:100], [*kind.model_fields, *NOT_YET], n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise ApiError(400, f"{name[:100]!r} is not a field of this request{hint}", param=name[:100])
        if not any(value == off and type(value) is type(off) for off in NOT_YET[name]):
            raise ApiError(400, f"{name!r} is not supported yet", param=name, code="unsupported_parameter")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise from_validation(error) from None


def _all_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is kind for item in value)


def _json_type(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
