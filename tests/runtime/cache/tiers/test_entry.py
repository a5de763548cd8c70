"""Keys know what they hang below, and a checksum covers every bit and whose it is."""

import torch
from k3compile.runtime.cache.tiers.entry import Declined, Key, digest, nbytes
from tier_entries import FINGERPRINT, OTHER, chain, entry_of

A, B = chain(2)


def test_a_state_hangs_below_the_pages_of_its_block_and_pages_below_those_before():
    assert Key(B, "state").above(A) == Key(B, "pages")
    assert Key(B, "pages").above(A) == Key(A, "pages")
    assert Key(A, "pages").above(None) is None


def test_bytes_are_those_of_the_tensors():
    assert nbytes({"a": torch.zeros(3, 5), "b": torch.zeros(2, dtype=torch.bfloat16)}) == 64


def test_the_checksum_changes_with_every_bit_and_with_all_that_says_whose_the_entry_is():
    key, entry = Key(B, "pages"), entry_of(Key(B, "pages"), 40)
    sums = {digest(key, FINGERPRINT, A, entry)}
    for name, tensor in entry.items():
        raw = tensor.view(-1).view(torch.uint8)
        for byte in range(len(raw)):
            raw[byte] ^= 1 << byte % 8
            sums.add(digest(key, FINGERPRINT, A, entry))
            raw[byte] ^= 1 << byte % 8
        sums.add(digest(key, FINGERPRINT, A, {**entry, name: tensor.view(-1, 1)}))
        sums.add(digest(key, FINGERPRINT, A, {**entry, name: tensor.view(torch.int16)}))
    sums.add(digest(Key(A, "pages"), FINGERPRINT, A, entry))
    sums.add(digest(Key(B, "state"), FINGERPRINT, A, entry))
    sums.add(digest(key, OTHER, A, entry))
    sums.add(digest(key, FINGERPRINT, None, entry))
    sums.add(digest(key, FINGERPRINT, A, {"a": entry["b"], "b": entry["a"]}))
    assert len(sums) == 1 + nbytes(entry) + 4 + 5
    assert digest(key, FINGERPRINT, A, dict(reversed(entry.items()))) in sums


def test_a_decline_says_its_reason():
    assert str(Declined("torn", "3 bytes")) == "torn: 3 bytes"
    assert (str(Declined("torn")), Declined("torn").reason) == ("torn", "torn")
