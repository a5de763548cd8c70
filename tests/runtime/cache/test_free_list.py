"""Free numbers: one owner each, number 0 for nobody, and books that notice every mistake (H05)."""

import random

import pytest
from k3compile.runtime.cache.free_list import FreeList


def test_number_zero_is_never_handed_out():
    pages = FreeList(5, "page")
    assert sorted(pages.take("a", 4)) == [1, 2, 3, 4]
    assert (len(pages), pages.used) == (0, 4)


def test_a_list_without_room_for_an_owner_is_refused():
    with pytest.raises(ValueError, match="at least 2 pages"):
        FreeList(1, "page")


def test_giving_back_twice_or_anothers_is_caught():
    pages = FreeList(5, "page")
    mine = pages.take("a", 2)
    with pytest.raises(AssertionError, match="does not belong to 'b'"):
        pages.give("b", mine)
    pages.give("a", mine)
    with pytest.raises(AssertionError, match="does not belong to 'a'"):
        pages.give("a", mine)


def test_taking_more_than_is_free_is_caught():
    with pytest.raises(AssertionError, match="5 pages asked, 4 free"):
        FreeList(5, "page").take("a", 5)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f, held: f._free.pop(), "1 pages leaked"),
        (lambda f, held: f._free.append(f._free[0]), "is free twice"),
        (lambda f, held: f._free.append(held["a"][0]), "is free but owned"),
        (lambda f, held: f._free.append(0), "does not exist"),
        (lambda f, held: held["b"].append(held["a"][0]), "held twice"),
        (lambda f, held: held["a"].append(0), "holds page 0"),
        (lambda f, held: held["a"].pop(), "leaked"),
        (lambda f, held: held.update(c=held.pop("a")), "owned otherwise"),
    ],
)
def test_check_sees_each_way_the_books_can_be_wrong(spoil, message):
    pages = FreeList(9, "page")
    held = {"a": pages.take("a", 2), "b": pages.take("b", 3)}
    pages.check(held)
    spoil(pages, held)
    with pytest.raises(AssertionError, match=message):
        pages.check(held)


def test_ten_thousand_random_takes_and_gives_keep_the_books():
    rng = random.Random(0)
    pages, held = FreeList(20, "page"), {}
    for turn in range(10_000):
        owner = rng.randrange(6)
        mine = held.setdefault(owner, [])
        if rng.random() < 0.5:
            mine += pages.take(owner, rng.randint(0, min(3, len(pages))))
        else:
            rng.shuffle(mine)
            back, held[owner] = mine[:2], mine[2:]
            pages.give(owner, back)
        if turn % 50 == 0:
            pages.check(held)
    for owner, mine in held.items():
        pages.give(owner, mine)
    assert len(pages) == 19
