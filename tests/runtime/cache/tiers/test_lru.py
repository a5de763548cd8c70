"""Leaves go first, the one used longest ago before the others; nothing goes before what hangs below it."""

import random

from k3compile.runtime.cache.tiers.lru import LeafLru


def drain(books: LeafLru) -> list:
    order = []
    while (goes := books.first_to_go()) is not None:
        order.append(goes)
        books.remove(goes)
    return order


def test_a_chain_goes_from_its_end_whatever_was_used_last():
    books = LeafLru()
    for name, above in ((1, None), (2, 1), (3, 2)):
        books.add(name, 10, above)
    books.touch(3)
    assert books.total == 30
    assert drain(books) == [3, 2, 1]
    assert (books.total, len(books)) == (0, 0)


def test_of_two_branches_the_one_used_longest_ago_goes_first():
    books = LeafLru()
    for name, above in (("root", None), ("x", "root"), ("y", "root"), ("x2", "x")):
        books.add(name, 1, above)
    books.touch("y")
    assert drain(books) == ["x2", "x", "y", "root"]


def test_an_entry_whose_parent_comes_later_keeps_it():
    books = LeafLru()
    books.add("child", 1, "parent", used=5)
    books.add("parent", 1, None, used=1)
    assert drain(books) == ["child", "parent"]


def test_adding_again_replaces():
    books = LeafLru()
    books.add("a", 1, None)
    books.add("b", 1, "a")
    books.add("b", 7, None)
    assert books.total == 8
    assert books.record("b").size == 7
    assert drain(books) == ["a", "b"]


def test_a_circle_of_entries_does_not_hold_for_ever():
    books = LeafLru()
    for name, above in (("a", "b"), ("b", "a"), ("self", "self")):
        books.add(name, 1, above)
    assert sorted(drain(books)) == ["a", "b", "self"]


def test_touching_for_ever_does_not_grow_the_heap():
    books = LeafLru()
    for name in range(10):
        books.add(name, 1, None)
    for i in range(10_000):
        books.touch(i % 10)
    assert len(books._leaves) < 200
    assert drain(books) == list(range(10))


def test_random_use_agrees_with_a_plain_search():
    rng, books, plain = random.Random(0), LeafLru(), {}
    for clock in range(3000):
        name = rng.randrange(40)
        match rng.randrange(4):
            case 0 | 1 if name not in plain:
                above = rng.choice([None, *range(name)]) if name else None
                books.add(name, name, above, used=clock)
                plain[name] = (clock, above)
            case 2:
                books.remove(name)
                plain.pop(name, None)
            case _:
                goes = books.first_to_go()
                leaves = [n for n in plain if all(above != n for _, above in plain.values())]
                assert goes == min(leaves, key=lambda n: plain[n][0], default=None)
        assert books.total == sum(plain)
