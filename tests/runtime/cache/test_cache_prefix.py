"""What a prefix gives to whom: lengths around the block, evictions, doubles, salts, junctions."""

import time

import pytest
from k3compile.runtime.cache.cache import NO_HIT, Cache
from k3compile.runtime.cache.orders import Clear, Copy
from k3compile.runtime.request import Request
from prefixes import UNIT, B, ask, begin, commit, go_on, make, serve, text


@pytest.mark.parametrize("exports", [True, False])
@pytest.mark.parametrize("retention", [None, 0, 2 * B])
@pytest.mark.parametrize("unit", [UNIT, B])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_prompts_around_the_block_resent_and_extended(off, k, unit, retention, exports):
    n = k * B + off
    cache = make(unit=unit, retention_interval=retention)
    assert serve(cache, text(n), exports=exports)[0] == 0
    assert serve(cache, text(n), exports=exports)[0] == (n - 1) // unit * unit
    assert serve(cache, text(n) + [3, 3, 3], exports=exports)[0] == n // unit * unit
    assert serve(cache, text(n), exports=exports)[0] == (n - 1) // unit * unit


@pytest.mark.parametrize("budget", [3, 8, 9, 1000])
@pytest.mark.parametrize("answer", [1, 2, 4, 5, 8, 13])
def test_the_next_turn_runs_only_what_is_new(answer, budget):
    cache = make()
    turn = serve(cache, text(21), answer, budget)[2]
    run = len(turn.tokens) - 1  # the last token was only sampled
    found, _, _ = serve(cache, [*turn.tokens, 7, 7, 7], budget=budget)
    assert found == run // UNIT * UNIT


def test_one_pass_leaves_the_prompts_state_and_without_exports_it_takes_more():
    assert serve(make(), text(23))[1] == 1
    assert serve(make(), text(23), exports=False)[1] == 3  # 16, then 20, then the rest, as the older engine
    assert serve(make(unit=B), text(23), exports=False)[1] == 2


def test_a_hit_leaves_a_token_to_run_and_the_empty_prefix_is_none():
    cache = make()
    serve(cache, text(16), answer=20)
    for n in range(1, 17):
        hit = cache.match(ask(text(n)))
        assert hit.tokens < n
        assert hit.tokens == 0 or hit.tokens >= UNIT
    assert cache.match(ask(text(4))) == NO_HIT
    assert cache.match(ask([99] * 30)) == NO_HIT


def test_nothing_is_kept_without_a_grid():
    cache = Cache(20, 3, 2)
    request = ask(text(8))
    assert cache.match(request) is NO_HIT
    assert not cache.deferred(request, NO_HIT)
    assert cache.admit(request, NO_HIT, 8)
    request.seen = 8
    cache.advance(request)
    assert len(cache.index) == 0
    assert cache.available == len(cache.pages)


def test_tenants_share_nothing_with_each_other():
    cache = make()
    serve(cache, text(20), salt="mine")
    assert serve(cache, text(20), salt="theirs")[0] == 0
    assert serve(cache, text(20))[0] == 0
    assert [serve(cache, text(20), salt=s)[0] for s in ("mine", "theirs", "")] == [16, 16, 16]


def test_a_hit_copies_the_state_and_starts_the_others_from_zero():
    cache = make()
    serve(cache, text(20))
    cache.take_writes()
    node = cache.match(ask(text(20))).node
    warm, cold = ask(text(20)), ask([5] * 6)
    begin(cache, warm)
    begin(cache, cold)
    writes = cache.take_writes()
    assert writes == [Copy([node.state], [cache.holding(warm).slot]), Clear([cache.holding(cold).slot])]
    assert list(cache.holding(warm).pages[:8]) == [p for n in path(node) for p in n.pages]
    cache.check()


def path(node):
    return [*path(node.parent), node] if node else []


def test_evicted_states_take_the_hit_down_and_leave_a_junction():
    cache = make()
    serve(cache, text(20))
    while cache.index.evict_state():
        pass
    hit = cache.match(ask(text(20)))
    assert (hit.tokens, hit.matched, hit.junction) == (0, 16, 16)
    assert serve(cache, text(20))[0] == 0
    assert serve(cache, text(20))[0] == 16


def test_evicted_pages_take_the_hit_down_to_the_last_state_that_is_left():
    cache = make()
    serve(cache, text(40), budget=8)  # states at 8, 16, 24, 32, 36, 40
    cache.index.evict_pages(2)  # the block that ends at 40
    assert cache.match(ask(text(45))).tokens == 36
    cache.index.evict_pages(4)
    assert cache.match(ask(text(45))).tokens == 24
    assert cache.match(ask(text(45))).matched == 28
    cache.check()


def test_one_kind_evicted_in_the_middle_counts_as_gone():
    """The state at 16 goes, its pages stay: 16 tokens match and 8 are hit."""
    cache = make()
    serve(cache, text(24), budget=8)
    node = cache.index.get(cache.chain(ask(text(24))).key(4))
    assert node.tokens == 16
    cache.index.lose_state(node)
    hit = cache.match(ask(text(19) + [7] * 8))
    assert (hit.tokens, hit.matched, hit.junction) == (8, 16, 16)


def test_two_that_share_a_beginning_leave_a_state_for_the_third():
    cache = make(block=32, retention_interval=0)
    serve(cache, text(20) + [1] * 11)
    first = cache.match(ask(text(20) + [2] * 11))
    assert (first.tokens, first.junction) == (0, 20)
    assert serve(cache, text(20) + [2] * 11)[1] == 2  # one stop, at the junction
    assert serve(cache, text(20) + [3] * 11)[0] == 20
    assert serve(cache, text(20) + [4] * 11)[:2] == (20, 1)


def test_a_block_of_this_step_is_not_readable_in_it():
    cache = make()
    first, second = ask(text(20)), ask(text(20))
    count = begin(cache, first)
    hit = cache.match(second)
    assert hit == NO_HIT
    assert cache.deferred(second, hit)
    assert not cache.deferred(ask([5] * 20), NO_HIT)
    assert not cache.deferred(ask(text(16)), NO_HIT)  # its hit would leave no token to run
    commit(cache, first, count)
    assert cache.match(second).tokens == 16
    assert not cache.deferred(second, cache.match(second))


def test_nobody_waits_for_less_than_it_has():
    cache = make(block=16)
    serve(cache, text(20))
    node = cache.index.get(cache.chain(ask(text(20))).key(2))
    assert (node.tokens, node.state) == (8, 0)
    begin(cache, ask(text(9)))  # leaves the state at 8
    late = ask(text(20))
    assert cache.match(late).tokens == 16
    assert not cache.deferred(late, cache.match(late))


def test_a_state_that_was_hit_outlives_one_that_was_not():
    cache = make(checkpoints=2)
    serve(cache, text(7))
    serve(cache, text(7, 50))
    serve(cache, text(7))
    serve(cache, text(7, 70))
    found = [cache.match(ask(text(7, start))).tokens for start in (10, 50, 70)]
    assert found == [4, 0, 4]


def test_who_waits_for_somebody_that_goes_waits_no_more():
    cache = make()
    first, second = ask(text(20)), ask(text(20))
    begin(cache, first)
    assert cache.deferred(second, NO_HIT)
    cache.release(first)
    assert not cache.deferred(second, NO_HIT)
    cache.check()
    assert cache.checkpoints.used == 0


def test_nobody_waits_for_ever():
    cache = make()
    begin(cache, ask(text(20)))  # never committed
    second = ask(text(20))
    waits = [cache.deferred(second, NO_HIT) for _ in range(9)]
    assert waits[0]
    assert not all(waits)
    assert waits == sorted(waits, reverse=True)


def test_two_that_compute_the_same_publish_it_once():
    cache = make()
    first, second = ask(text(20)), ask(text(20))
    counts = [begin(cache, r) for r in (first, second)]
    assert cache.declines["made by another"] == 1
    commit(cache, first, counts[0])
    commit(cache, second, counts[1])
    assert len(cache.index) == 5
    assert cache.holding(first).pages == cache.holding(second).pages  # the second gave its own back
    assert cache.pages.used == len(cache.holding(first).pages)
    for _ in range(6):  # they part
        commit(cache, first, go_on(cache, first), 1)
        commit(cache, second, go_on(cache, second), 2)
    cache.release(first)
    cache.check()
    cache.release(second)
    cache.drop()
    assert (cache.pages.used, cache.slots.used, cache.checkpoints.used) == (0, 0, 0)


def test_a_prefix_in_use_outlives_every_other_when_the_cache_fills():
    """A decodes on a shared prefix, B copies it and ends, then others need all the room."""
    cache = make(pages=30, checkpoints=3)
    serve(cache, text(16))
    a, b = ask(text(16) + [1, 1]), ask(text(16) + [2, 2])
    counts = [begin(cache, r) for r in (a, b)]
    assert [r.seen for r in (a, b)] == [16, 16]
    commit(cache, a, counts[0])
    commit(cache, b, counts[1])
    cache.release(b)
    kept = list(cache.holding(a).pages[:8])
    for i in range(5):
        serve(cache, text(24, 100 * i + 100))
    assert cache.index.evicted_pages > 0
    assert list(cache.holding(a).pages[:8]) == kept
    assert cache.match(ask(text(16) + [3])).matched == 16
    commit(cache, a, go_on(cache, a))
    cache.release(a)
    cache.drop()
    assert cache.pages.used == 0


def test_a_refused_admission_changes_nothing():
    cache = make(pages=20, requests=2)
    serve(cache, text(16))
    running = ask([5] * 8)
    begin(cache, running)
    before = (cache.pages.used, cache.slots.used, cache.index.idle_pages)
    request = ask(text(40))
    hit = cache.match(request)
    request.seen = hit.tokens
    assert hit.tokens == 16
    assert not cache.admit(request, hit, 4)
    assert (cache.pages.used, cache.slots.used, cache.index.idle_pages) == before
    assert cache.declines["no pages"] == 1
    cache.take_writes()
    fits = ask(text(16) + [1] * 14)  # 7 pages beside the 8 of its hit and the 4 that run, which are all 19
    fits.seen = cache.match(fits).tokens
    assert not cache.admit(fits, cache.match(fits), 1, reserve=1)
    assert cache.admit(fits, cache.match(fits), 14)
    assert cache.available == 0
    cache.check()


def test_a_thrown_out_request_goes_on_from_what_it_published():
    cache = make()
    request = ask(text(30))
    commit(cache, request, begin(cache, request, budget=17))
    cache.release(request)
    request.seen = 0
    assert begin(cache, request) == 14
    assert request.seen == 16


@pytest.mark.parametrize("blocks", [1, 2, 7, 8, 9])
@pytest.mark.parametrize(("block", "unit"), [(1536, 64), (1536, 1536), (7168, 128)])
def test_a_state_is_found_by_its_token_count_whatever_the_blocks(blocks, block, unit):
    cache = make(pages=2400, block=block, unit=unit, page=64)
    request = ask([7] * (9 * block + 10))
    slots = {}
    count = begin(cache, request, budget=block)
    while request.unseen > 1:
        slots[request.seen + count] = cache.holding(request).planned.slot if count == block else 0
        commit(cache, request, count)
        count = go_on(cache, request, budget=block) if request.unseen > 1 else 0
    cache.release(request)
    cache.take_writes()
    again = ask([7] * (blocks * block + 1))
    begin(cache, again)
    assert again.seen == blocks * block
    assert cache.take_writes() == [Copy([slots[blocks * block]], [cache.holding(again).slot])]
    assert len(cache.holding(again).pages) == blocks * block // 64 + 1


def test_a_loaded_prefix_counts_like_a_computed_one():
    cache = make()
    request = ask(text(20))
    assert cache.admit(request, NO_HIT, 16)
    request.seen = 16
    cache.advance(request, loaded=True)
    writes = cache.take_writes()
    node = cache.match(ask(text(20))).node
    assert node.tokens == 16
    assert writes == [Clear([cache.holding(request).slot]), Copy([cache.holding(request).slot], [node.state])]
    cache.check()


def test_what_left_before_it_was_told_is_not_told():
    cache = make()
    cache.index.record = True
    serve(cache, text(9))
    cache.drop()
    assert cache.take_published() == []


def test_a_pinned_prefix_survives_the_drop_of_everything():
    cache = make()
    serve(cache, text(20))
    node = cache.match(ask(text(20))).node
    cache.index.pin(node)
    cache.drop()
    assert cache.match(ask(text(20))).tokens == 16
    cache.index.unpin(node)
    cache.drop()
    assert (cache.pages.used, cache.checkpoints.used, len(cache.index)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"unit": 4, "page": 3}, "prefix_match_unit=4 is no multiple of page_size=3"),
        ({"checkpoints": 0}, "num_checkpoints=0 leaves nowhere to keep a state"),
        ({"retention_interval": 4}, "retention_interval=4 is neither 0 nor a multiple"),
        ({"page": 0}, "page_size must be at least 1"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(more, message):
    with pytest.raises(ValueError, match=message):
        make(**more)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda c, r: c.states.pending.update(x=4), "a state is waited for that nobody makes"),
        (lambda c, r: setattr(c.holding(r), "slot", 3), "in a slot of somebody else"),
        (
            lambda c, r: c.holding(r).pages.__setitem__(0, c.holding(r).pages[9]),
            "reads pages that",
        ),
        (lambda c, r: setattr(c.holding(r), "tip", None), "locks instead of"),
        (lambda c, r: setattr(c.holding(r).tip, "state", 0), "may not go|leaked"),
    ],
)
def test_check_sees_what_a_request_holds_wrongly(spoil, message):
    cache = make()
    serve(cache, text(20))
    request = ask(text(30))
    commit(cache, request, begin(cache, request))
    spoil(cache, request)
    with pytest.raises(AssertionError, match=message):
        cache.check()


def test_a_long_prompt_is_matched_and_a_full_house_decodes_in_little_time():
    cache = make(pages=9000, requests=64, checkpoints=200, block=1536, unit=64, page=64)
    long = list(range(100_000))
    serve(cache, long, budget=8192)
    request = ask([*long, 1])
    cache.match(request)
    start = time.thread_time()
    for _ in range(10):
        cache.match(request)
    assert (time.thread_time() - start) / 10 < 0.005
    many = [ask([i] * 70) for i in range(64)]
    for r in many:
        commit_unchecked(cache, r, begin(cache, r))
    times = []
    for _ in range(64):
        start = time.thread_time()
        for r in many:
            cache.grow(r, 1)
            commit_unchecked(cache, r, 1)
        times.append(time.thread_time() - start)
    assert sorted(times)[32] < 0.002


def commit_unchecked(cache: Cache, request: Request, count: int) -> None:
    request.seen += count
    request.tokens.append(1)
    cache.advance(request)


def test_what_a_prompt_would_leave_behind_is_known_before_it_runs():
    every, ends = make(), make(retention_interval=0)
    request = ask(text(22))
    assert [t for t in range(4, 24, 4) if every.keeps(request, t)] == [8, 16, 20]
    assert [t for t in range(4, 24, 4) if ends.keeps(request, t)] == [20]
