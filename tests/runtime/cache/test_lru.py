"""Oldest first, whatever was added again or taken out in between."""

import random

from k3compile.runtime.cache.lru import Lru


def test_the_oldest_comes_out_first():
    lru = Lru()
    for item, stamp in [("a", 3), ("b", 1), ("c", 2)]:
        lru.add(item, stamp)
    assert [lru.pop() for _ in range(4)] == ["b", "c", "a", None]


def test_adding_again_moves_and_discarding_removes():
    lru = Lru()
    for stamp, item in enumerate("abc"):
        lru.add(item, stamp)
    lru.add("a", 9)
    lru.discard("b")
    lru.discard("never in")
    assert len(lru) == 2
    assert "b" not in lru
    assert [lru.pop(), lru.pop(), lru.pop()] == ["c", "a", None]


def test_a_member_put_back_with_an_older_stamp_is_not_found_twice():
    lru = Lru()
    lru.add("a", 5)
    lru.discard("a")
    lru.add("a", 5)
    assert [lru.pop(), lru.pop()] == ["a", None]


def test_members_are_never_compared():
    lru = Lru()
    for _ in range(3):
        lru.add(object(), 7)
    assert len([lru.pop() for _ in range(3)]) == 3


def test_random_use_agrees_with_a_sorted_list_and_leaves_no_heap_behind():
    rng, lru, plain = random.Random(0), Lru(), {}
    for stamp in range(20_000):
        item = rng.randrange(50)
        what = rng.random()
        if what < 0.7:
            lru.add(item, stamp)
            plain[item] = stamp
        elif what < 0.85:
            lru.discard(item)
            plain.pop(item, None)
        else:
            oldest = min(plain, key=plain.get, default=None)
            assert lru.pop() == oldest
            plain.pop(oldest, None)
        assert len(lru) == len(plain)
    assert len(lru._heap) <= 2 * 50 + 66


def test_the_oldest_stamp_is_known_before_it_goes():
    lru = Lru()
    assert lru.oldest() is None
    for item, stamp in [("a", 3), ("b", 1), ("a", 5)]:
        lru.add(item, stamp)
    lru.discard("b")
    assert (lru.oldest(), lru.pop(), lru.oldest()) == (5, "a", None)
