"""A file gives back the very entry it was made for, or says in one word why not."""

import json
import random
import struct

import pytest
from k3compile.runtime.cache.tiers.disk_file import (
    FORMAT,
    check_owner,
    decode,
    encode,
    file_name,
    read_header,
    read_name,
)
from k3compile.runtime.cache.tiers.entry import Declined, Key
from safetensors.torch import save
from tier_entries import FINGERPRINT, OTHER, chain, entry_of, same

A, B = chain(2)
KEY = Key(B, "pages")


def whole() -> bytes:
    return encode(KEY, FINGERPRINT, A, entry_of(KEY, 60))


def why_not(data: bytes, key: Key = KEY, fingerprint: str = FINGERPRINT) -> str:
    with pytest.raises(Declined) as caught:
        decode(data, key, fingerprint)
    return caught.value.reason


def test_an_entry_comes_back_bit_for_bit_with_its_parent():
    entry, parent = decode(whole(), KEY, FINGERPRINT)
    assert same(entry, entry_of(KEY, 60))
    assert parent == A
    assert decode(encode(KEY, FINGERPRINT, None, entry), KEY, FINGERPRINT)[1] is None


def test_every_single_flipped_bit_is_noticed():
    data, reasons = whole(), set()
    for byte in range(len(data)):
        changed = bytearray(data)
        changed[byte] ^= 1 << byte % 8
        reasons.add(why_not(bytes(changed)))
    assert reasons == {"torn", "foreign", "checksum"}


def test_every_flipped_bit_of_the_payload_is_a_checksum_error():
    data = whole()
    (length,) = struct.unpack("<Q", data[:8])
    for byte in range(8 + length, len(data)):
        changed = bytearray(data)
        changed[byte] ^= 0x10
        assert why_not(bytes(changed)) == "checksum"


def test_every_shorter_file_and_a_longer_one_are_torn():
    data = whole()
    assert {why_not(data[:length]) for length in range(len(data))} == {"torn"}
    assert why_not(data + b"\0") == "torn"


def test_another_model_or_another_entry_is_foreign():
    assert why_not(whole(), fingerprint=OTHER) == "foreign"
    assert why_not(whole(), key=Key(A, "pages")) == "foreign"
    assert why_not(whole(), key=Key(B, "state")) == "foreign"


def test_safetensors_that_are_not_ours_are_foreign():
    assert why_not(save(entry_of(KEY, 60))) == "foreign"
    assert why_not(save(entry_of(KEY, 60), {"format": "pt"})) == "foreign"
    assert why_not(whole().replace(FORMAT.encode(), b"k3-tier/9")) == "foreign"


def test_hostile_headers_are_torn_and_cost_nothing():
    deep = b"[" * 100_000
    for header in (
        deep,
        b"{}",
        b"null",
        b'{"__metadata__": 3}',
        b'{"__metadata__": {}, "a": []}',
        b"\xff" * 50,
    ):
        assert why_not(struct.pack("<Q", len(header)) + header) in ("torn", "foreign")
    assert why_not(struct.pack("<Q", 1 << 62) + b"{}" * 100) == "torn"
    assert why_not(b"") == "torn"


def test_random_bytes_and_random_json_never_raise_anything_else():
    rng, data = random.Random(0), whole()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    values = [None, -1, 1e300, "x", [], {}, [0, "1"], [1 << 70, 1 << 71]]
    for _ in range(300):
        changed = json.loads(json.dumps(header))
        name = rng.choice(list(changed))
        part = changed[name]
        part[rng.choice(list(part))] = rng.choice(values)
        text = json.dumps(changed).encode()
        file = struct.pack("<Q", len(text)) + text + data[8 + length :]
        assert why_not(file) in ("torn", "foreign", "checksum")
        assert why_not(rng.randbytes(rng.randrange(200))) in ("torn", "foreign")


def test_a_name_says_key_and_model_and_nothing_else_is_a_name():
    name = file_name(KEY, FINGERPRINT)
    assert read_name(name) == (KEY, FINGERPRINT[:16])
    for other in (name + ".part", "x" + name, name.upper(), name[1:], "model.safetensors", name + "\n", ""):
        assert read_name(other) is None


def test_a_header_is_enough_to_know_whose_a_file_is_and_how_long():
    header = read_header(whole()[:2000])
    assert header.size == len(whole())
    assert header.parent == A
    check_owner(header, KEY, FINGERPRINT)
    with pytest.raises(Declined, match="another model"):
        check_owner(header, KEY, OTHER)
