"""The host tier holds its bound, keeps what others hang below, and says why it declines."""

import threading

import pytest
from k3compile.runtime.cache.tiers.entry import Declined, Key, nbytes
from k3compile.runtime.cache.tiers.host import HostTier
from tier_entries import chain, entry_of, same

SIZE = nbytes(entry_of(Key(chain(1)[0], "pages"), 100))


def filled(blocks: int, room: int) -> tuple[HostTier, list[Key]]:
    tier, hashes = HostTier(room * SIZE), chain(blocks)
    keys = [Key(h, "pages") for h in hashes]
    for key, parent in zip(keys, [None, *hashes]):
        tier.put(key, entry_of(key, 100), parent)
    return tier, keys


def test_what_was_put_comes_back():
    tier, keys = filled(3, room=3)
    assert all(same(tier.get(key), entry_of(key, 100)) for key in keys)
    assert (len(tier), tier.bytes) == (3, 3 * SIZE)


def test_an_unknown_key_is_not_found():
    tier, keys = filled(1, room=1)
    with pytest.raises(Declined, match="not_found"):
        tier.get(Key(keys[0].hash, "state"))


def test_more_than_the_whole_tier_is_too_big():
    tier = HostTier(SIZE - 1)
    key = Key(chain(1)[0], "pages")
    with pytest.raises(Declined, match="too_big"):
        tier.put(key, entry_of(key, 100), None)
    assert (key in tier, tier.bytes) == (False, 0)


def test_a_chain_longer_than_the_tier_keeps_its_beginning():
    tier, keys = filled(4, room=4)
    hashes = chain(5)
    with pytest.raises(Declined, match="no_room"):
        tier.put(Key(hashes[4], "pages"), entry_of(keys[0], 100), hashes[3])
    assert all(key in tier for key in keys)


def test_another_prefix_drives_out_the_end_of_the_one_used_longest_ago():
    tier, keys = filled(3, room=4)
    for name in ("x", "y"):
        key = Key(chain(1, name)[0], "pages")
        tier.put(key, entry_of(key, 100), None)
    assert [key in tier for key in keys] == [True, True, False]
    tier.get(keys[1])
    key = Key(chain(1, "z")[0], "pages")
    tier.put(key, entry_of(key, 100), None)
    assert Key(chain(1, "x")[0], "pages") not in tier
    assert keys[1] in tier


def test_the_bound_holds_while_threads_put_and_get_the_same_keys():
    tier, wrong = HostTier(5 * SIZE), []
    hashes = chain(12)

    def work(seed: int) -> None:
        for i in range(200):
            block = (i * 7 + seed) % 12
            key = Key(hashes[block], "pages")
            try:
                tier.put(key, entry_of(key, 100), hashes[block - 1] if block else None)
                if not same(tier.get(key), entry_of(key, 100)):
                    wrong.append(key)
            except Declined as error:
                if error.reason not in ("no_room", "not_found"):
                    wrong.append(error)
            if tier.bytes > 6 * SIZE:  # one is entered before another leaves
                wrong.append(tier.bytes)

    threads = [threading.Thread(target=work, args=(s,)) for s in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert tier.bytes <= 5 * SIZE
    assert tier.bytes == sum(nbytes(tier.get(key)) for key in list(tier._entries))


def test_a_tier_without_a_byte_is_refused():
    with pytest.raises(ValueError, match="at least 1 byte"):
        HostTier(0)


def test_what_is_put_again_counts_as_used():
    tier, keys = HostTier(2 * SIZE), [Key(chain(1, name)[0], "pages") for name in "abc"]
    for key in (keys[0], keys[1], keys[0], keys[2]):
        tier.put(key, entry_of(key, 100), None)
    assert [key in tier for key in keys] == [True, False, True]
