"""One choice of a response while it grows: engine updates in, visible deltas out.

Streamed or not, an answer is read token by token by the same code, so both give the same text, the same
split into channels, the same end and the same counts. Whichever comes first ends it: a stop string, a stop
token or a limit; tokens that the engine made beyond a stop string are neither shown nor counted.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..parse import MARKS, Delta, OutputParser, joined
from ..text_stream import StopStrings, TextStream
from ..tokenizer import Tokenizer

if TYPE_CHECKING:
    from ..engine import Update
    from ..sampler import TokenLogprobs


class Reader(Protocol):
    """Turns tokens into deltas; ``matched`` is the stop string it met."""

    matched: str | None
    reasoning_tokens: int

    def push(self, token: int) -> list[Delta]: ...
    def finish(self, stop_token: int | None) -> list[Delta]: ...


class TextReader:
    """Plain text: everything is content."""

    reasoning_tokens = 0

    def __init__(self, stream: TextStream):
        self._stream = stream

    @property
    def matched(self) -> str | None:
        return self._stream.matched

    def push(self, token: int) -> list[Delta]:
        return _content(self._stream.push([token]))

    def finish(self, stop_token: int | None) -> list[Delta]:
        return _content(self._stream.finish(stop_token))


class ChatReader:
    """Channels. Stop strings are looked for in the content only: not while thinking, not in markers."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        thinking: bool,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ):
        self._tokenizer = tokenizer
        self._parser = OutputParser(thinking, tokenizer)
        self._stops = StopStrings(stop, include_stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def matched(self) -> str | None:
        return self._stops.matched

    @property
    def reasoning_tokens(self) -> int:
        return self._parser.reasoning_tokens

    def push(self, token: int) -> list[Delta]:
        self._num_tokens += 1
        return self._filter(self._parser.push([token]))

    def finish(self, stop_token: int | None) -> list[Delta]:
        deltas: list[Delta] = []
        if self._tokenizer.control_names.get(stop_token) in MARKS:
            deltas = self.push(stop_token)  # the end of the message also ends an open call
        deltas += self._filter(self._parser.finish())
        return deltas if self.matched is not None else deltas + _content(self._stops.finish())

    def _filter(self, deltas: list[Delta]) -> list[Delta]:
        out: list[Delta] = []
        for delta in deltas:
            if self.matched is not None:
                break
            if delta.channel != "content":
                out += _content(self._stops.finish()) + [delta]
            elif self._num_tokens <= self._min_tokens:
                out.append(delta)
            else:
                out += _content(self._stops.push(delta.text))
        return out


class Piece(NamedTuple):
    """What one update adds: deltas, and a logprobs entry for each token that counts."""

    deltas: list[Delta]
    logprobs: list[TokenLogprobs]


class Answer:
    """One choice. ``finish_reason`` is None while it grows; ``error`` says why it failed.

    stop_reason: the stop string, or that of ``stop_ids``, which ended it; None for the model's own end.
    """

    def __init__(self, reader: Reader, stop_ids: Container[int] = ()):
        self.reader = reader
        self._stop_ids = stop_ids
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None
        self.num_tokens = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self._num_calls = 0

    def take(self, update: Update) -> Piece:
        """Read an update. The token that ended the answer counts but is not shown."""
        assert self.finish_reason is None, "an answer that has ended takes nothing"
        self.prompt_tokens, self.cached_tokens = update.prompt_tokens, update.cached_tokens
        tokens = list(update.tokens)
        stop_token = tokens.pop() if update.finish == "stop" else None
        before, deltas = self.num_tokens, []
        for token in tokens:
            self.num_tokens += 1
            deltas += self.reader.push(token)
            if self.reader.matched is not None:
                break
        if self.reader.matched is None and update.finish is not None:
            self.num_tokens += stop_token is not None
            deltas += self.reader.finish(stop_token)
        self._num_calls += sum(delta.call is not None for delta in deltas)
        if self.reader.matched is not None:
            self._end("stop", self.reader.matched)
        elif update.finish is not None:
            self.error = update.error
            self._end(update.finish, stop_token if stop_token in self._stop_ids else None)
        return Piece(joined(deltas), (update.logprobs or [])[: self.num_tokens - before])

    def _end(self, reason: str, stop: str | int | None) -> None:
        self.finish_reason = "tool_calls" if reason == "stop" and self._num_calls else reason
        self.stop_reason = stop


def _content(text: str) -> list[Delta]:
    return [Delta("content", text)] if text else []
