"""Tokens to text as they come: no half character is shown, no half stop string, nothing behind a stop.

    tokens  ->  bytes  ->  whole characters  ->  text without a possible start of a stop string
               held until UTF-8 is whole         held until it is one or cannot become one

Which stop string wins is decided by where it ends, not where it starts: the first to be complete, and among
those that end together the longest. So the answer does not depend on how the text was cut into tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from .tokenizer import CLOSE, OPEN, SEP, Tokenizer

KEPT_CONTROLS = (OPEN, CLOSE, SEP)  # the released tokenizer calls these three "not special"


class StopStrings:
    """Looks for stop strings in pieces of text; ``matched`` is the one found, or None.

    include: whether the stop string itself stays in the text. Raises ``ValueError`` for an empty string.
    """

    def __init__(self, stops: Sequence[str] = (), include: bool = False):
        if not all(stops):
            raise ValueError("stop holds an empty string, which would stop every answer at once")
        self.stops = tuple(stops)
        self.include = include
        self.matched: str | None = None
        self._held = ""

    def push(self, text: str) -> str:
        """The part of the text that is safe to show; "" once a stop string was found."""
        if self.matched is not None:
            return ""
        if not self.stops:
            return text
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self.stops if (start := text.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self.include else start]
        keep = len(text) - self._possible_start(text)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """What was held back: the text is over, so it was no stop string."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = min(len(text), max(map(len, self.stops)) - 1)
        for size in range(longest, 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self.stops):
                return size
        return 0


class TextStream:
    """One answer's tokens as text, for callers that do not split it into channels.

    stop: strings that end the answer. include_stop: keep the one found. skip_control: leave control tokens
    out of the text, except the three that K3's markup consists of. min_tokens: so many tokens are read
    before stop strings count. ``num_tokens`` counts tokens up to the one that completed a stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_control: bool = True,
        min_tokens: int = 0,
    ):
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._stops = StopStrings(stop, include_stop)
        self._skip_control = skip_control
        self._min_tokens = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stops.matched

    def push(self, tokens: Iterable[int]) -> str:
        """New text. Tokens behind a stop string are neither shown nor counted."""
        out = []
        for token in tokens:
            if self.matched is not None:
                break
            self.num_tokens += 1
            out.append(self._search(self._decode(token)))
        return "".join(out)

    def finish(self, stop_token: int | None = None) -> str:
        """The rest: held text, and U+FFFD for a character that never became whole.

        stop_token: the id that ended the answer, counted here but never shown.
        """
        if self.matched is not None:
            return ""
        self.num_tokens += stop_token is not None
        text = self._search(self._decoder.decode(b"", final=True))
        return text if self.matched is not None else text + self._stops.finish()

    def _search(self, text: str) -> str:
        return text if self.num_tokens <= self._min_tokens else self._stops.push(text)

    def _decode(self, token: int) -> str:
        name = self._tokenizer.control_names.get(token)
        if name is None:
            return self._decoder.decode(self._tokenizer.decode_bytes([token]))
        rest = self._decoder.decode(b"", final=True)  # a control token ends a half character
        return rest if self._skip_control and name not in KEPT_CONTROLS else rest + name
