"""One entry as a safetensors file that says whose it is and can be checked to the last bit.

    name      <chain hash>.<kind>.<fingerprint, 16 hex>.safetensors
    metadata  format, key, kind, parent, fingerprint, digest      digest: over the tensors and all the others
    payload   the tensors

The name is only a hint: a renamed file still says its key, and is refused.
"""

from __future__ import annotations

import json
import re
import struct
from typing import NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load, save

from .entry import HASH_BYTES, KINDS, Declined, Entry, Key, digest

FORMAT = "k3-tier/1"  # raise the number when the meaning of a stored tensor changes
HEADER_LIMIT = 1 << 20
PART = ".part"
NAME = re.compile(rf"([0-9a-f]{{{2 * HASH_BYTES}}})\.({'|'.join(KINDS)})\.([0-9a-f]{{16}})\.safetensors")
PART_NAME = re.compile(r"\." + NAME.pattern + r"\.[0-9]+-[0-9a-f]+\.part")


class Header(NamedTuple):
    """What a file says of itself. size: bytes the file must have."""

    metadata: dict[str, str]
    size: int

    @property
    def parent(self) -> bytes | None:
        """Hash of the block before, None for the first block."""
        raw = bytes.fromhex(self.metadata["parent"])
        if raw.hex() != self.metadata["parent"]:
            raise ValueError("hex digits as we do not write them")
        return raw or None


class Named(NamedTuple):
    """What a file name says."""

    key: Key
    fingerprint: str  # its first 16 digits


def file_name(key: Key, fingerprint: str) -> str:
    """Where an entry lies in the folder."""
    return f"{key.hash.hex()}.{key.kind}.{fingerprint[:16]}.safetensors"


def read_name(name: str) -> Named | None:
    """The inverse of :func:`file_name`; None for what is not ours."""
    match = NAME.fullmatch(name)
    return Named(Key(bytes.fromhex(match[1]), match[2]), match[3]) if match else None


def encode(key: Key, fingerprint: str, parent: bytes | None, entry: Entry) -> bytes:
    """The whole file."""
    metadata = {
        "format": FORMAT,
        "key": key.hash.hex(),
        "kind": key.kind,
        "parent": (parent or b"").hex(),
        "fingerprint": fingerprint,
        "digest": digest(key, fingerprint, parent, entry),
    }
    return save(entry, metadata)


def read_header(start: bytes) -> Header:
    """From the first bytes of a file, HEADER_LIMIT + 8 of them or all.

    Raises :class:`Declined`: torn when they are no header, foreign when it is not one of ours.
    """
    if len(start) < 8:
        raise Declined("torn", f"{len(start)} bytes")
    (length,) = struct.unpack("<Q", start[:8])
    if not 0 < length <= min(HEADER_LIMIT, len(start) - 8):
        raise Declined("torn", f"a header of {length:,} bytes")
    try:
        said = json.loads(start[8 : 8 + length])
        metadata = dict(said.pop("__metadata__"))
        ends = [tensor["data_offsets"][1] for tensor in said.values()]
        header = Header(metadata, 8 + length + max(ends))
        if metadata["format"] != FORMAT:
            raise Declined("foreign", f"format {metadata['format']!r}")
        _ = header.parent, metadata["fingerprint"], metadata["key"], metadata["kind"], metadata["digest"]
    except KeyError as error:
        raise Declined("foreign", f"the header lacks {error}") from None
    except (ValueError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise Declined("torn", f"the header does not parse: {type(error).__name__}") from None
    return header


def check_owner(header: Header, key: Key, fingerprint: str) -> None:
    """Raise :class:`Declined` (foreign) unless the file says it is this entry of this model."""
    said = header.metadata
    if said["fingerprint"] != fingerprint:
        raise Declined("foreign", "it was written by another model or another layout of pools")
    if (said["key"], said["kind"]) != (key.hash.hex(), key.kind):
        raise Declined("foreign", "it holds another entry than its name says")


def decode(data: bytes, key: Key, fingerprint: str) -> tuple[Entry, bytes | None]:
    """The tensors of a whole file and its parent, when it is this very entry and no bit of it has changed.

    Raises :class:`Declined`: torn, foreign, checksum.
    """
    header = read_header(data)
    check_owner(header, key, fingerprint)
    if len(data) != header.size:
        raise Declined("torn", f"{len(data):,} bytes, and the header tells of {header.size:,}")
    try:
        entry = load(data)
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise Declined("torn", f"the tensors do not parse: {error}") from None
    if digest(key, fingerprint, header.parent, entry) != header.metadata["digest"]:
        raise Declined("checksum", "the file is not what was written")
    return entry, header.parent
