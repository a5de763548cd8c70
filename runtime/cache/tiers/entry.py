"""What a tier keeps: named tensors under the hash of a prefix.

    prefix    | block 0 | block 1 | block 2 |        h tokens a block, chain hashes h0 h1 h2
    "pages"       h0        h1        h2             latents of one block, of every layer that has pages
    "state"                           h2             what the recurrent layers remember after block 2

A prefix can be continued where the pages of all its blocks and the state of its last one are there. So an
entry hangs below another, and is worth nothing without it: a state below the pages of its own block, pages
below those of the block before.
"""

from __future__ import annotations

import hashlib
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["pages", "state"]
KINDS: tuple[Kind, ...] = ("pages", "state")
HASH_BYTES = 32

Entry = dict[str, Tensor]  # on the CPU, contiguous; never written to once it is in a tier


class Key(NamedTuple):
    """Names an entry: the chain hash after its block, and what is kept of it."""

    hash: bytes
    kind: Kind

    def above(self, parent: bytes | None) -> Key | None:
        """The entry this one is worth nothing without. parent: hash of the block before, None for the
        first.
        """
        if self.kind == "state":
            return Key(self.hash, "pages")
        return None if parent is None else Key(parent, "pages")


class Declined(Exception):
    """A tier does not take or does not have an entry. ``reason`` is one word to count by."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


def nbytes(entry: Entry) -> int:
    """Bytes of the tensors."""
    return sum(t.numel() * t.element_size() for t in entry.values())


def digest(key: Key, fingerprint: str, parent: bytes | None, entry: Entry) -> str:
    """Hex checksum over every bit of the tensors and over what says whose they are."""
    made = hashlib.blake2b(digest_size=32)
    made.update(f"{key.hash.hex()} {key.kind} {fingerprint} {(parent or b'').hex()}\n".encode())
    for name, tensor in sorted(entry.items()):
        made.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        made.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return made.hexdigest()
