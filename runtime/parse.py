"""K3's answer split into channels while it is being written: reasoning, content, tool calls.

    output := [ reasoning  C think S ] [ O response S ] text  C response S  [ tools ]  C message S  E
    tools  := O tools S  { O call tool="NAME" index="N" S  { argument | json }  C call S }  C tools S

O, C, S and E are `<|open|>`, `<|close|>`, `<|sep|>` and `<|end_of_msg|>`. With thinking on the prompt has
opened the think channel already; with thinking off it has opened the response. Rules where models differ
from the grammar, the same for a whole answer, a stream, and an answer that was cut:

* Text without any marker stays in the channel that the prompt opened, finished or cut: thinking on and no
  marker means all of it is reasoning and the content is empty.
* Thinking ends with `C think S`, with the opening of the response or the tools, or with the closing of one.
* Closing any part leads to content; only `C message S` or E ends the answer. What follows is dropped.
* A marker that is known is never shown. A control token that begins no known marker is dropped, and the
  words after it stay. A marker cut by the end of the answer is dropped.
* Inside an argument every marker is text, except those that close the argument, its call, the tools or the
  message: the last three also close what was left open. Read from ids, a marker is control tokens only, so
  an argument that merely spells one is safe; read from text the two cannot be told apart.
* A call counts once its `C call S` (or a marker that implies it) is there; a cut call and a call without
  a name are dropped. `json` counts only before any argument.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Literal, NamedTuple

import regex

from .tokenizer import CLOSE, END_OF_MSG, OPEN, SEP, Tokenizer
from .tool_arguments import Argument, join_arguments

Channel = Literal["reasoning", "content", "tool_call"]
MARKS = (OPEN, CLOSE, SEP, END_OF_MSG)

_NAMES = "think|response|tools|call|argument|json|message"
_OPENING = regex.compile(rf'(?P<name>{_NAMES})(?: (?P<key>[a-z_]+)="(?P<value>[^"]*)")*')
_CLOSING = regex.compile(rf"(?P<name>{_NAMES})")
_LONGEST_HEADER = 4096  # characters; a tool name is far shorter, and held text must have an end


class ToolCall(NamedTuple):
    """A complete call. ``arguments`` is JSON object text; ``index`` counts the calls of an answer from 0."""

    index: int
    name: str
    arguments: str


class Delta(NamedTuple):
    """New output of one channel; ``call`` is set, and ``text`` holds its arguments, for "tool_call"."""

    channel: Channel
    text: str
    call: ToolCall | None = None


class OutputParser:
    """Feed tokens (or text) as they come; deltas come back as soon as they are certain.

    thinking: whether the prompt opened the think channel. tokenizer: needed to push ids.
    ``reasoning_tokens`` counts the ids that were read while thinking, the markers that end it included.
    """

    def __init__(self, thinking: bool, tokenizer: Tokenizer | None = None):
        self.reasoning_tokens = 0
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._spelled = ""  # end of pushed text that may become a control spelling
        self._header: str | None = None  # text since an open or close token
        self._opens = False  # which of the two it was
        self._state = "reasoning" if thinking else "content"
        self._out: list[Delta] = []
        self._num_calls = 0
        self._call_name = ""
        self._arguments: list[Argument] = []
        self._json: str | None = None
        self._value: list[str] = []  # body of the open argument or json element
        self._attributes: dict[str, str] = {}

    @property
    def done(self) -> bool:
        """Whether the message was closed; nothing more will come out."""
        return self._state == "done"

    @property
    def thinking(self) -> bool:
        return self._state == "reasoning"

    def push(self, piece: Iterable[int] | str) -> list[Delta]:
        """Deltas of new token ids, or of new text in which the four control tokens are spelled out."""
        if isinstance(piece, str):
            self._push_text(piece)
        else:
            for token in piece:
                self.reasoning_tokens += self.thinking
                self._push_id(token)
        return self._take()

    def finish(self) -> list[Delta]:
        """The rest, when the answer is over: held text, but no half marker and no half call."""
        spelled, self._spelled = self._spelled, ""
        if self._header is None:
            self._text(spelled + self._decoder.decode(b"", final=True))
        self._header = None
        return self._take()

    def _take(self) -> list[Delta]:
        out, self._out = self._out, []
        return joined(out)

    def _push_id(self, token: int) -> None:
        name = self._tokenizer.control_names.get(token)
        if name is None:
            self._text(self._decoder.decode(self._tokenizer.decode_bytes([token])))
            return
        self._text(self._decoder.decode(b"", final=True))  # a control token ends a half character
        if name in MARKS:
            self._control(name)
        else:
            self._text(name)

    def _push_text(self, text: str) -> None:
        text = self._spelled + text
        self._spelled = ""
        at = 0
        while (start := text.find("<", at)) >= 0:
            rest = text[start : start + max(map(len, MARKS))]
            mark = next((m for m in MARKS if rest.startswith(m)), None)
            if mark:
                self._text(text[:start])
                self._control(mark)
                text, at = text[start + len(mark) :], 0
            elif any(m.startswith(rest) for m in MARKS):
                text, self._spelled = text[:start], text[start:]
                break
            else:
                at = start + 1
        self._text(text)

    def _text(self, text: str) -> None:
        if not text or self.done:
            return
        if self._header is not None:
            self._header += text
            pattern = _OPENING if self._opens else _CLOSING
            if len(self._header) > _LONGEST_HEADER or not pattern.fullmatch(self._header, partial=True):
                self._spill()
        else:
            self._body(text)

    def _body(self, text: str) -> None:
        if self._state in ("reasoning", "content"):
            self._out.append(Delta(self._state, text))
        elif self._state in ("argument", "json"):
            self._value.append(text)
        # text between the elements of a tools section belongs to nobody

    def _spill(self) -> None:
        """The header was no marker after all: its words are body."""
        text, self._header = self._header, None
        self._body((OPEN if self._opens else CLOSE) + text if self._in_value else text)

    @property
    def _in_value(self) -> bool:
        return self._state in ("argument", "json")

    def _control(self, name: str) -> None:
        if self.done:
            return
        had_header = self._header is not None
        if had_header:
            self._end_header(ended_by_sep=name == SEP)
        if name == END_OF_MSG:
            self._close("message")
        elif name in (OPEN, CLOSE) and not self.done:
            self._header, self._opens = "", name == OPEN
        elif name == SEP and not had_header and self._in_value:
            self._body(SEP)

    def _end_header(self, ended_by_sep: bool) -> None:
        """Any control token ends a marker, not only the S it should have."""
        header = self._header
        match = (_OPENING if self._opens else _CLOSING).fullmatch(header)
        literal = (OPEN if self._opens else CLOSE) + header + (SEP if ended_by_sep else "")
        if match is None:
            self._spill()
            if ended_by_sep and self._in_value:
                self._body(SEP)
            return
        self._header = None
        name = match["name"]
        if self._in_value and (self._opens or not self._closes_value(name)):
            self._body(literal)
        elif self._opens:
            self._open(name, dict(zip(match.captures("key"), map(_unescape, match.captures("value")))))
        else:
            self._close(name)

    def _closes_value(self, name: str) -> bool:
        return name == self._state or name in ("call", "tools", "message")

    def _open(self, name: str, attributes: dict[str, str]) -> None:
        if name in ("think", "response", "tools"):
            self._state = {"think": "reasoning", "response": "content"}.get(name, name)
        elif name == "call":
            self._state, self._call_name = "call", attributes.get("tool", "")
            self._arguments, self._json = [], None
        elif self._state == "call" and (name == "argument" or (name == "json" and not self._arguments)):
            self._state, self._value, self._attributes = name, [], attributes

    def _close(self, name: str) -> None:
        if self._in_value:
            self._end_value()
        if name in ("call", "tools", "message") and self._state == "call":
            self._end_call()
        if name == "message":
            self._state = "done"
        elif name in ("response", "tools") or (name == "think" and self.thinking):
            self._state = "content"

    def _end_value(self) -> None:
        text = "".join(self._value)
        if self._state == "json":
            self._json = text
        else:
            self._arguments.append(
                Argument(self._attributes.get("key", ""), self._attributes.get("type", "string"), text)
            )
        self._state = "call"

    def _end_call(self) -> None:
        self._state = "tools"
        if self._call_name:
            arguments = join_arguments(self._arguments) if self._json is None else self._json
            call = ToolCall(self._num_calls, self._call_name, arguments)
            self._num_calls += 1
            self._out.append(Delta("tool_call", arguments, call))


def _unescape(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")


def joined(deltas: list[Delta]) -> list[Delta]:
    """Neighbours of one text channel become one delta."""
    out: list[Delta] = []
    for delta in deltas:
        if out and delta.call is None and out[-1].channel == delta.channel and out[-1].call is None:
            out[-1] = Delta(delta.channel, out[-1].text + delta.text)
        else:
            out.append(delta)
    return out
