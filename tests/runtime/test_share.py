"""Shares of a step: what long prompts leave each other, and nothing is kept for a prompt that waits."""

import pytest
from k3compile.runtime.budget import DraftCost, Limits
from k3compile.runtime.cache.cache import NO_HIT, Cache
from k3compile.runtime.cache.checkpoints import Grid
from k3compile.runtime.request import Request
from k3compile.runtime.share import Coming, fair_share, share_of


def limits(budget=2048, **more) -> Limits:
    return Limits(**{"max_num_batched_tokens": budget, "max_model_len": 100_000, **more})


def cache(pages=4000, block=512) -> Cache:
    return Cache(pages, 9, 64, grid=Grid(block, 64) if block else None, num_checkpoints=9 if block else 0)


def prompt(length, salt="", first=5) -> Request:
    return Request(f"{length}{salt}", [first, *[7] * (length - 1)], cache_salt=salt)


@pytest.mark.parametrize(
    ("unseen", "share"),
    [
        ([32_000], 2048),
        ([2000, 48], 2048),
        ([32_000, 32_000, 48], 1000),
        ([32_000, 1, 1, 1], 2045),
        ([3000, 100, 5000], 974),
        ([3000] * 16, 256),
    ],
)
def test_what_fits_is_served_whole_and_the_rest_is_divided(unseen, share):
    assert fair_share(limits(), unseen) == share


def test_drafts_are_paid_first():
    assert fair_share(limits(draft=DraftCost.of(8)), [32_000, 32_000]) == (2048 - 2 * 7) // 2


def test_short_prompts_are_not_looked_at_any_closer():
    assert share_of(limits(), None, [prompt(2048)], [prompt(3)] * 9) == 2048


def test_a_prompt_that_waits_for_the_same_prefix_takes_no_rows():
    books = cache()
    same, other = [prompt(32_000), prompt(32_000)], prompt(32_000, first=6)
    assert share_of(limits(), books, [], same) == 2048
    assert share_of(limits(), books, same[:1], same[1:]) == 2048
    assert share_of(limits(), books, [], [*same, other]) == 1024
    assert share_of(limits(), books, [], [prompt(32_000, "a"), prompt(32_000, "b")]) == 1024
    assert share_of(limits(), cache(block=0), [], same) == 1024


def test_a_prompt_without_pages_takes_no_share():
    assert share_of(limits(), cache(600, 0), [], [prompt(32_000), prompt(32_000, first=6)]) == 2048


def test_a_prefix_is_waited_for_only_where_it_is_longer_than_the_hit_and_leaves_a_token():
    books, leader = cache(), prompt(2000)
    coming = Coming(books)
    coming.add(leader, 512)
    assert coming.holds_more_of(prompt(1025), 960)
    assert not coming.holds_more_of(prompt(1024), 0)
    assert not coming.holds_more_of(prompt(2000), 1024)
    assert not coming.holds_more_of(prompt(2000, first=6), 0)
    done = Coming(books)
    done.add(prompt(600), 599)
    assert not done.holds_more_of(prompt(600), 0)


def test_a_junction_is_waited_for_like_an_end():
    coming, leader = Coming(cache(block=4096)), prompt(6000)
    coming.add(leader, 0, 1024)
    assert coming.holds_more_of(prompt(1025), 0)
    assert not coming.holds_more_of(prompt(1025), 1024)
    passed = Coming(cache(block=4096))
    passed.add(leader, 1024, 1024)
    assert not passed.holds_more_of(prompt(1025), 0)


def test_what_is_cached_needs_no_pages_and_no_rows():
    books, first = cache(pages=600, block=512), prompt(30_000)
    books.admit(first, NO_HIT, 30_000)
    books.checkpoint(first, 29_696)
    first.seen = 29_952
    books.advance(first)
    assert books.match(prompt(30_000)).tokens == 29_696
    books.release(first)
    assert share_of(limits(), books, [prompt(5000, first=6)], [prompt(30_000)]) == 2048 - 304
