"""A prefix has one name, and only it has that name."""

import time
from array import array

import pytest
from k3compile.runtime.cache.hashes import HASH_BYTES, Chain


def chain(tokens, salt="", unit=4) -> Chain:
    return Chain(array("q", tokens), salt, unit)


def test_equal_prefixes_have_equal_keys_and_others_do_not():
    a, b = chain(range(12)), chain([*range(8), 9, 9, 9, 9])
    assert [a.key(n) == b.key(n) for n in range(4)] == [True, True, True, False]
    assert len({a.key(n) for n in range(4)}) == 4
    assert all(len(a.key(n)) == HASH_BYTES for n in range(4))


def test_a_block_is_named_by_all_that_comes_before_it():
    assert chain([1] * 4 + [2] * 4).key(2) != chain([3] * 4 + [2] * 4).key(2)
    assert chain([1] * 8).key(1) != chain([1] * 8).key(2)


def test_each_salt_has_names_of_its_own_from_the_empty_prefix_on():
    plain, mine, theirs = chain(range(8)), chain(range(8), "mine"), chain(range(8), "theirs")
    for n in range(3):
        assert len({plain.key(n), mine.key(n), theirs.key(n)}) == 3


def test_a_salt_of_half_a_character_is_a_salt_like_any_other():
    """JSON may hold one; raised from a plan, it would end the engine for everybody."""
    halves = [chain(range(4), salt).key(1) for salt in ("\ud800", "\udfff", "?", "")]
    assert len(set(halves)) == 4


def test_the_names_outlive_the_process():
    assert chain([1, 2, 3, 4], "tenant").key(1).hex().startswith("23c5be0d99f95a5e")


def test_tokens_that_come_later_make_later_keys():
    tokens = array("q", range(6))
    growing = Chain(tokens, "", 4)
    first = growing.key(1)
    with pytest.raises(AssertionError, match="2 blocks of 4 of 6 tokens"):
        growing.key(2)
    tokens.extend([6, 7])
    assert growing.key(2) == chain(range(8)).key(2)
    assert growing.key(1) == first


def test_a_long_prompt_is_hashed_once(monkeypatch):
    long, calls = chain(range(100_000), unit=64), []
    import k3compile.runtime.cache.hashes as module

    right = module.blake2b
    monkeypatch.setattr(module, "blake2b", lambda *a, **k: calls.append(1) or right(*a, **k))
    for n in (10, 1000, 500, 1562, 1562, 3):
        long.key(n)
    assert len(calls) == 1562


def test_a_prompt_of_100_000_tokens_takes_milliseconds():
    times = []
    for _ in range(5):
        fresh = chain(range(100_000), unit=64)
        start = time.thread_time()
        fresh.key(1562)
        times.append(time.thread_time() - start)
    assert min(times) < 0.05
