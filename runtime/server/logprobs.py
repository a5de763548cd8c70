"""Log-probabilities in the two shapes of OpenAI's API.

    chat         content: [{token, logprob, bytes, top_logprobs: [{token, logprob, bytes}]}]
    completions  tokens, token_logprobs, top_logprobs: [{token: logprob}], text_offset: one list each

JSON has no infinity: a token that had no chance is written as -9999.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

from ..text_stream import KEPT_CONTROLS
from ..tokenizer import Tokenizer

if TYPE_CHECKING:
    from ..sampler import TokenLogprobs

LOWEST = -9999.0


class LogprobWriter:
    """Writes the entries of one answer. ``offset``: characters in front of its text. ``skip_control``:
    whether the text leaves control tokens out, which then take no place in it.
    """

    def __init__(self, tokenizer: Tokenizer, offset: int = 0, skip_control: bool = False):
        self._tokenizer = tokenizer
        self._skip_control = skip_control
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def chat(self, entries: list[TokenLogprobs]) -> dict:
        return {"content": [self._chat_entry(entry) for entry in entries], "refusal": None}

    def _chat_entry(self, entry: TokenLogprobs) -> dict:
        top = [self._chat_token(token, logprob) for token, logprob in entry.top]
        return {**self._chat_token(entry.token, entry.logprob), "top_logprobs": top}

    def _chat_token(self, token: int, logprob: float) -> dict:
        data = self._tokenizer.decode_bytes([token])
        return {"token": data.decode(errors="replace"), "logprob": bounded(logprob), "bytes": list(data)}

    def completion(self, entries: list[TokenLogprobs]) -> dict:
        out: dict = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, logprob, top in entries:
            out["tokens"].append(self._spelled(token))
            out["token_logprobs"].append(bounded(logprob))
            top = {self._spelled(other): bounded(value) for other, value in top}
            out["top_logprobs"].append({self._spelled(token): bounded(logprob), **top})
            out["text_offset"].append(self._offset)
            self._offset += self._length(token)
        return out

    def _length(self, token: int) -> int:
        """Characters that the token adds to the text, counted as :class:`TextStream` shows them."""
        name = self._tokenizer.control_names.get(token)
        if name is None:
            return len(self._decoder.decode(self._tokenizer.decode_bytes([token])))
        rest = self._decoder.decode(b"", final=True)
        return len(rest) + (0 if self._skip_control and name not in KEPT_CONTROLS else len(name))

    def _spelled(self, token: int) -> str:
        """The token's text; its bytes when it is no whole text, so that two such tokens stay two."""
        data = self._tokenizer.decode_bytes([token])
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def bounded(logprob: float) -> float:
    return max(logprob, LOWEST)


def merged(parts: list[dict]) -> dict:
    """The lists of several parts joined, for an answer that is not streamed."""
    first = parts[0] if parts else {}
    return {
        key: [item for part in parts for item in part[key]] if isinstance(first[key], list) else first[key]
        for key in first
    }
