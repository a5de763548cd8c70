"""The tokenizer again as a ``tokenizer.json``, for clients that read only that.

    tiktoken.model    rank of a token's bytes: two neighbours join if their join has a rank, lowest first
    tokenizer.json    list of pairs that join: every way to cut a token in two, in the order of the ranks

Bytes are spelled as printable characters, as byte-level BPE files do. The model itself never reads this.
"""

from __future__ import annotations

import json
from pathlib import Path

from .tokenizer import END_OF_MSG, PRE_SPLIT, control_ids, read_ranks


def write_hf_tokenizer(path: Path, rank_file: bytes) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``path`` for the bytes of a rank file.

    The end token is the one that ends a message, because such clients stop there.
    """
    path.mkdir(exist_ok=True)
    ranks = read_ranks(rank_file, name="tiktoken.model")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "[BOS]",
        "eos_token": END_OF_MSG,
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1048576,
    }
    for name, content in (("tokenizer.json", tokenizer_json(ranks)), ("tokenizer_config.json", settings)):
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        (path / name).write_text(text, encoding="utf-8")


def tokenizer_json(ranks: dict[bytes, int]) -> dict:
    """The file's content."""
    spell = byte_characters()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": PRE_SPLIT}, "behavior": "Isolated", "invert": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    control = control_ids(len(ranks))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": name, **flags} for name, index in control.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {spelled(token, spell): rank for token, rank in ranks.items()},
            "merges": [[spelled(left, spell), spelled(right, spell)] for left, right in merges(ranks)],
        },
    }


def merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every cut of a token into two tokens, by the token's rank and then by the ranks of the parts."""
    pairs = []
    for token, rank in ranks.items():
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        pairs += [(rank, ranks[left], ranks[right], left, right) for left, right in known]
    return [(left, right) for *_, left, right in sorted(pairs)]


def byte_characters() -> list[str]:
    """Byte -> character: printable Latin-1 as itself, the rest from U+0100 on."""
    ranges = (("!", "~"), ("¡", "¬"), ("®", "ÿ"))
    printable = [byte for low, high in ranges for byte in range(ord(low), ord(high) + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(256 + others.index(byte)) if byte in others else chr(byte) for byte in range(256)]


def spelled(token: bytes, spell: list[str]) -> str:
    """The characters of a token."""
    return "".join(spell[byte] for byte in token)
