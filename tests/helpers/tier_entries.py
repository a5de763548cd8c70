"""Entries whose every number follows from their key, so that a reader can tell whether they are right."""

from __future__ import annotations

import hashlib

import torch
from k3compile.runtime.cache.tiers.entry import Entry, Key

FINGERPRINT = hashlib.sha256(b"one model").hexdigest()
OTHER = hashlib.sha256(b"another model").hexdigest()


def chain(blocks: int, name: str = "prompt") -> list[bytes]:
    """Hashes of the blocks of a prefix."""
    hashes = [hashlib.sha256(name.encode()).digest()]
    while len(hashes) < blocks:
        hashes.append(hashlib.sha256(hashes[-1]).digest())
    return hashes


def entry_of(key: Key, values: int = 1024) -> Entry:
    """The one right entry of a key, 4 bytes a value and a few more."""
    generator = torch.Generator().manual_seed(int.from_bytes(key.hash[:6], "little") + len(key.kind))
    first = torch.randn(values, generator=generator)
    return {"a": first, "b": first[:6].view(2, 3).to(torch.bfloat16)}


def same(a: Entry, b: Entry) -> bool:
    """Equal names, dtypes, shapes and bits."""
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and a[n].shape == b[n].shape and bits(a[n]) == bits(b[n]) for n in a
    )


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
