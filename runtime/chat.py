"""From chat messages to K3's prompt: segments, not a string, so user text can never become a control token.

    <|open|> message  role =" user "  <|sep|> Hello <|close|> message <|sep|> <|end_of_msg|>      one message
    markup   text     text..........  markup  text  ...                                           its segments

Order: tool declaration, thinking effort, messages, tool choice, response format, generation prompt.
Each segment is encoded apart by ``Tokenizer.encode_segments``; the joined text is for reading only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from . import chat_notes
from .tokenizer import CLOSE, END_OF_MSG, OPEN, SEP
from .tool_arguments import split_arguments

Numbered = tuple[int, Mapping]  # place in the request, message
ROLES = ("system", "user", "assistant", "tool")


class Segment(NamedTuple):
    """A piece of prompt: one control token when ``is_markup``, else plain text, whatever it spells."""

    text: str
    is_markup: bool


def render(
    messages: Sequence[Mapping],
    *,
    thinking: bool = True,
    effort: str | None = "max",
    tools: Sequence[Mapping] | None = None,
    tool_choice: str | None = None,
    response_format: Mapping | None = None,
    add_generation_prompt: bool = True,
) -> list[Segment]:
    """Segments of a conversation in OpenAI's message shapes.

    thinking: the answer starts in the think channel, and every assistant message of the history carries the
    think pair, even when empty; without it there is no think pair at all. effort: low, high, max or None for
    no note; the released template's default is "max"; it has no effect without thinking.
    Raises ``ValueError`` beginning with the field: ``messages[2].role is ...``.
    """
    if effort is not None:
        chat_notes.check_effort(effort)
    out: list[Segment] = []
    if tools:
        out += _note("tool-declare", chat_notes.tool_declare(tools))
    if thinking and effort is not None:
        out += _note("thinking-effort", chat_notes.thinking_effort(effort))
    out += _history(messages, thinking)
    if note := chat_notes.tool_choice(tool_choice):
        out += _note("tool-choice", note)
    if note := chat_notes.response_format(response_format):
        out += _note("response-format", note)
    if add_generation_prompt:
        out += _open("message", role="assistant") + _open("think" if thinking else "response")
    return out


def _history(messages: Sequence[Mapping], thinking: bool) -> Iterator[Segment]:
    calls: list[Mapping] = []  # of the newest assistant message
    answered = 0  # tool results since then
    for at, message in _in_call_order(messages):
        where = f"messages[{at}]"
        role = message.get("role")
        if role == "tool":
            answered += 1
            attrs = {"tool": _tool_name(message, calls, answered, where), "index": str(answered)}
            yield from _message(role, attrs, _body(message.get("content"), where))
        elif role == "assistant":
            calls, answered = list(message.get("tool_calls") or []), 0
            yield from _message(role, _named(message), _assistant(message, calls, thinking, where))
        elif role == "system" and message.get("tools"):
            yield from _note("tool-declare", chat_notes.tool_declare(message["tools"], dynamic=True))
        elif role in ("system", "user"):
            yield from _message(role, _named(message), _body(message.get("content"), where))
        else:
            raise ValueError(f"{where}.role is {role!r}; K3 knows {', '.join(ROLES)}")


def _assistant(message: Mapping, calls: list[Mapping], thinking: bool, where: str) -> list[Segment]:
    out: list[Segment] = []
    if thinking:
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        out += [*_open("think"), *_text(reasoning), *_close("think")]
    out += [*_open("response"), *_body(message.get("content"), where), *_close("response")]
    if calls:
        out += _open("tools")
        for index, call in enumerate(calls, start=1):
            out += _call(call, index, f"{where}.tool_calls[{index - 1}]")
        out += _close("tools")
    return out


def _call(call: Mapping, index: int, where: str) -> list[Segment]:
    function = call.get("function", call)
    if not function.get("name"):
        raise ValueError(f"{where}.function.name is missing")
    out = _open("call", tool=function["name"], index=str(index))
    try:
        arguments = split_arguments(function.get("arguments"))
    except ValueError as error:
        raise ValueError(f"{where}.function.{error}") from None
    if isinstance(arguments, str):
        out += [*_open("json", type="object"), *_text(arguments), *_close("json")]
    else:
        for key, kind, text in arguments:
            out += [*_open("argument", key=key, type=kind), *_text(text), *_close("argument")]
    return out + _close("call")


def _in_call_order(messages: Sequence[Mapping]) -> list[Numbered]:
    """Numbered messages; a run of tool results with known ids is sorted into the order of the calls."""
    out: list[Numbered] = []
    run: list[Numbered] = []
    places: dict[str, tuple[int, str]] = {}  # call id -> place, tool name
    for at, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages[{at}] is {type(message).__name__}, not an object")
        if message.get("role") == "tool":
            run.append((at, message))
            continue
        out += _sorted_run(run, places)
        run = []
        if message.get("role") == "assistant":
            places = _places(message.get("tool_calls") or [])
        out.append((at, message))
    return out + _sorted_run(run, places)


def _places(calls: Iterable[Mapping]) -> dict[str, tuple[int, str]]:
    places: dict[str, tuple[int, str]] = {}
    for place, call in enumerate(calls):
        if call.get("id") is not None:
            places.setdefault(str(call["id"]), (place, call.get("function", call).get("name")))
    return places


def _sorted_run(run: list[Numbered], places: dict[str, tuple[int, str]]) -> list[Numbered]:
    found = [places.get(str(message.get("tool_call_id"))) for _, message in run]
    if not all(found):
        return run
    order = sorted(range(len(run)), key=lambda i: found[i][0])  # stable: equal ids keep their order
    return [(run[i][0], {**run[i][1], "tool": found[i][1]}) for i in order]


def _tool_name(message: Mapping, calls: list[Mapping], answered: int, where: str) -> str:
    """The matched call's name, else the message's own, else the call at the same place."""
    name = message.get("tool") or message.get("name")
    if not name and answered <= len(calls):
        name = calls[answered - 1].get("function", calls[answered - 1]).get("name")
    if not name:
        raise ValueError(f"{where}.tool_call_id matches no call, and no name says which tool it is")
    return name


def _body(content: str | Sequence[Mapping] | None, where: str) -> list[Segment]:
    """Text, or a list of text parts, each its own segment."""
    if content is None or isinstance(content, str):
        return _text(content or "")
    out: list[Segment] = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"{where}.content[{at}].type is {kind!r}; only text parts are supported")
        out += _text(part["text"])
    return out


def _named(message: Mapping) -> dict[str, str]:
    return {"name": message["name"]} if message.get("name") else {}


def _note(kind: str, body: str) -> list[Segment]:
    return _message("system", {"type": kind}, _text(body))


def _message(role: str, attrs: Mapping[str, str], body: Iterable[Segment]) -> list[Segment]:
    out = [*_open("message", role=role, **attrs), *body, *_close("message")]
    return out + [Segment(END_OF_MSG, True)]


def _open(tag: str, **attrs: str) -> list[Segment]:
    out = [Segment(OPEN, True), Segment(tag, False)]
    for name, value in attrs.items():
        escaped = str(value).replace("&", "&amp;").replace('"', "&quot;")
        out += [Segment(f" {name}", False), Segment('="', False), *_text(escaped), Segment('"', False)]
    return out + [Segment(SEP, True)]


def _close(tag: str) -> list[Segment]:
    return [Segment(CLOSE, True), Segment(tag, False), Segment(SEP, True)]


def _text(text: str) -> list[Segment]:
    return [Segment(text, False)] if text else []
