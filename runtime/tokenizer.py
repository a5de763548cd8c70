"""K3's tokenizer: byte-level BPE by rank, and 256 control ids that ordinary text can never reach.

    id   0 .. R-1        R .............................. R+255        R = lines of tiktoken.model
         byte-pair       control: [BOS] [EOS] <|end_of_msg|> <|open|> <|close|> <|sep|> ... [UNK] [PAD]

The released file has R = 163584. Our presets keep the same 256 control ids at the same offsets behind
fewer ranks, so whatever holds for an offset holds for every checkpoint.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path

import tiktoken

NUM_CONTROL = 256

END_OF_MSG, OPEN, CLOSE, SEP = "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"
CONTROL_OFFSETS: Mapping[str, int] = {
    "[BOS]": 0,
    "[EOS]": 1,
    END_OF_MSG: 2,  # the stop id; [EOS] is not
    OPEN: 3,
    CLOSE: 4,
    SEP: 5,
    "[start_header_id]": 6,
    "[end_header_id]": 7,
    "[EOT]": 9,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "<osagent_mode>": 65,
    "[UNK]": 254,
    "[PAD]": 255,
}

# "Letters without Han" needs a class intersection. Each alternative is tried in this order at each position.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PRE_SPLIT = "|".join(
    [
        r"\p{Han}+",
        _LEAD + _UPPER + "*" + _LOWER + "+" + _CONTRACTION,
        _LEAD + _UPPER + "+" + _LOWER + "*" + _CONTRACTION,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

MAX_CHUNK_CHARS = 400_000
MAX_RUN_CHARS = 25_000


def runs_above(length: int) -> re.Pattern:
    """Runs of more than ``length`` characters, looked for where one begins only: to try every place of a
    run takes the square of its length, and nothing else of the process runs meanwhile.
    """
    return re.compile(rf"(?<!\s)\s{{{length + 1},}}|(?<!\S)\S{{{length + 1},}}")


_LONG_RUN = runs_above(MAX_RUN_CHARS)


class Tokenizer:
    """Text to ids and back for one checkpoint folder (or one ``tiktoken.model`` file).

    Raises ``ValueError`` when the rank file is missing or damaged, naming the line. Safe to share between
    threads: nothing changes after construction.
    """

    def __init__(self, path: str | Path):
        file = Path(path)
        file = file / "tiktoken.model" if file.is_dir() else file
        if not file.is_file():
            raise ValueError(f"no tokenizer at {file}: a checkpoint folder holds a file 'tiktoken.model'")
        ranks = read_ranks(file.read_bytes(), name=str(file))
        self.num_ranks = len(ranks)
        self.vocab_size = self.num_ranks + NUM_CONTROL
        self.control_ids: Mapping[str, int] = control_ids(self.num_ranks)
        self._encoding = tiktoken.Encoding(
            name=file.parent.name,
            pat_str=PRE_SPLIT,
            mergeable_ranks=ranks,
            special_tokens=dict(self.control_ids),
        )

    @property
    def stop_id(self) -> int:
        """The id that ends an assistant message, ``<|end_of_msg|>``."""
        return self.control_ids[END_OF_MSG]

    @cached_property
    def control_names(self) -> Mapping[int, str]:
        return {index: name for name, index in self.control_ids.items()}

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest ordinary token: a text of n characters has at least n / longest_token ids."""
        return max(map(len, self._encoding.token_byte_values()))

    def is_control(self, index: int) -> bool:
        return index >= self.num_ranks

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text. A control spelling in it becomes plain bytes, never a control id."""
        ids: list[int] = []
        for chunk in split_chunks(text):
            ids.extend(self._encoding.encode_ordinary(chunk))
        return ids

    def encode_segments(self, segments: Iterable[tuple[str, bool]]) -> list[int]:
        """Ids of ``(text, is_markup)`` segments, each encoded apart.

        Markup must be exactly one control spelling (``ValueError`` otherwise); all else is ordinary text.
        """
        ids: list[int] = []
        for text, is_markup in segments:
            if is_markup:
                if text not in self.control_ids:
                    raise ValueError(f"{text!r} is not a control token of this tokenizer")
                ids.append(self.control_ids[text])
            else:
                ids.extend(self.encode(text))
        return ids

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of ``ids``, control tokens spelled out. Raises ``ValueError`` for an id out of range."""
        ids = list(ids)
        for index in ids:
            if not 0 <= index < self.vocab_size:
                raise ValueError(f"token id {index} is outside 0..{self.vocab_size - 1}")
        return self._encoding.decode_bytes(ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``, control tokens spelled out; broken UTF-8 becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


def control_ids(num_ranks: int) -> dict[str, int]:
    """Name to id of the 256 control tokens behind ``num_ranks`` ranks; unnamed ones carry their id."""
    names = {offset: name for name, offset in CONTROL_OFFSETS.items()}
    return {
        names.get(offset, f"<|reserved_token_{num_ranks + offset}|>"): num_ranks + offset
        for offset in range(NUM_CONTROL)
    }


def split_chunks(text: str) -> Iterator[str]:
    """Pieces that BPE may take at once: at most 400,000 characters, no run of one kind above 25,000.

    A run is a stretch of only whitespace or only non-whitespace; a longer one is cut every 25,000.
    """
    for start in range(0, len(text), MAX_CHUNK_CHARS):
        chunk = text[start : start + MAX_CHUNK_CHARS]
        done = 0
        for run in _LONG_RUN.finditer(chunk):
            for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                yield chunk[done:cut]
                done = cut
        yield chunk[done:]


def read_ranks(data: bytes, name: str) -> dict[bytes, int]:
    """Rank table of a ``tiktoken.model`` file: lines of base64 token and rank, ranks 0, 1, 2, ...

    Raises ``ValueError`` with the line number for a malformed, repeated or misnumbered line, and when one
    of the 256 single bytes has no rank (some text could then not be encoded at all).
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token_text, rank_text = line.split()
            token, rank = base64.b64decode(token_text, validate=True), int(rank_text)
        except (ValueError, binascii.Error):
            raise ValueError(f"{name}, line {number}: expected a base64 token and a rank") from None
        if rank != len(ranks) or token in ranks:
            raise ValueError(f"{name}, line {number}: rank {rank} is repeated or out of order")
        ranks[token] = rank
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"{name}: {len(missing)} single bytes have no rank, first 0x{missing[0]:02x}")
    return ranks
