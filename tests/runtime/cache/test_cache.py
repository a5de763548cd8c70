"""Pages and slots are given together or not at all, and everything comes back."""

import pytest
from k3compile.runtime.cache.cache import NO_HIT, Cache
from k3compile.runtime.cache.orders import Clear, Poison
from k3compile.runtime.request import Request


def make(tokens: int) -> Request:
    return Request(f"r{tokens}", [1] * tokens)


def test_a_request_gets_a_slot_and_the_pages_of_its_first_chunk():
    cache = Cache(num_pages=10, num_slots=3, page_size=4)
    request = make(20)
    assert cache.admit(request, NO_HIT, 5)
    holding = cache.holding(request)
    assert holding.slot > 0
    assert len(holding.pages) == 2
    assert 0 not in holding.pages
    cache.check()


def test_without_a_slot_nothing_is_taken_although_pages_are_there():
    cache = Cache(num_pages=100, num_slots=2, page_size=4)
    assert cache.admit(make(4), NO_HIT, 4)
    late = make(5)
    assert not cache.admit(late, NO_HIT, 5)
    assert cache.pages.used == 1
    cache.check()


def test_without_pages_for_all_known_tokens_no_slot_is_taken():
    cache = Cache(num_pages=4, num_slots=5, page_size=4)
    assert not cache.admit(make(13), NO_HIT, 1)
    assert cache.slots.used == 0
    assert not cache.admit(make(12), NO_HIT, 1, reserve=1)
    assert cache.admit(make(12), NO_HIT, 1, reserve=0)


def test_growing_takes_pages_only_at_page_borders():
    cache = Cache(num_pages=4, num_slots=2, page_size=4)
    request = make(3)
    assert cache.admit(request, NO_HIT, 3)
    held = []
    for seen in range(3, 12):
        request.seen = seen
        held.append(len(cache.grow(request, 1).pages))
    assert held == [1, 2, 2, 2, 2, 3, 3, 3, 3]
    request.seen = 12
    assert cache.grow(request, 1) is None
    assert len(cache.holding(request).pages) == 3
    cache.check()


def test_a_refused_growth_changes_nothing():
    cache = Cache(num_pages=4, num_slots=3, page_size=4)
    first, second = make(4), make(5)
    assert cache.admit(first, NO_HIT, 4)
    assert cache.admit(second, NO_HIT, 4)
    first.seen = 4
    assert cache.grow(first, 9) is None
    assert cache.pages.used == 2
    assert cache.grow(first, 4) is not None


def test_release_gives_everything_back_once():
    cache = Cache(num_pages=4, num_slots=2, page_size=4)
    request = make(9)
    cache.admit(request, NO_HIT, 9)
    cache.release(request)
    cache.release(request)
    assert (cache.pages.used, cache.slots.used) == (0, 0)
    cache.check()


def test_the_slot_of_every_admission_is_listed_for_clearing_once():
    cache = Cache(num_pages=9, num_slots=3, page_size=4)
    a, b = make(4), make(5)
    cache.admit(a, NO_HIT, 4)
    cache.admit(b, NO_HIT, 5)
    slots = [cache.holding(a).slot, cache.holding(b).slot]
    assert cache.take_writes() == [Clear(slots)]
    assert cache.take_writes() == []
    cache.release(a)
    cache.admit(a, NO_HIT, 4)
    assert cache.take_writes() == [Clear([cache.holding(a).slot])]


def test_poison_lists_what_was_freed_and_a_reused_slot_is_cleared_after_it():
    cache = Cache(num_pages=9, num_slots=2, page_size=4, poison=True)
    a, b = make(8), make(4)
    cache.admit(a, NO_HIT, 8)
    cache.take_writes()
    slot, pages = cache.holding(a).slot, list(cache.holding(a).pages)
    cache.release(a)
    cache.admit(b, NO_HIT, 4)
    assert cache.take_writes() == [Poison([slot], pages), Clear([slot])]


def test_check_notices_tokens_without_pages():
    cache = Cache(num_pages=9, num_slots=2, page_size=4)
    request = make(8)
    cache.admit(request, NO_HIT, 4)
    request.seen = 5
    with pytest.raises(AssertionError, match="seen more than its 1 pages hold"):
        cache.check()


def test_admitting_twice_is_our_mistake():
    cache = Cache(num_pages=9, num_slots=3, page_size=4)
    request = make(4)
    cache.admit(request, NO_HIT, 4)
    with pytest.raises(AssertionError, match="admitted twice"):
        cache.admit(request, NO_HIT, 4)
