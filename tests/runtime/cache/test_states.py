"""Which states get a slot, when another finds them, and what becomes of those nobody reached (H03, H04)."""

from k3compile.runtime.cache.cache import NO_HIT, Cache
from k3compile.runtime.cache.orders import Poison
from prefixes import UNIT, ask, begin, commit, go_on, make, serve, text, verify


def test_a_boundary_between_the_stop_and_the_accepted_drafts_leaves_nothing():
    """Seven drafts are accepted, the third token is a stop, the boundary lies between."""
    cache = make()
    request = ask(text(16))
    commit(cache, request, begin(cache, request))
    states = cache.checkpoints.used
    assert verify(cache, request, [1, 2, 3]) == 0
    cache.release(request)
    assert cache.checkpoints.used == states
    assert cache.match(ask([*request.tokens, 9, 9])).tokens == 16


def test_a_boundary_inside_the_kept_drafts_gets_the_state_of_its_own_count():
    cache = make()
    request = ask(text(16))
    commit(cache, request, begin(cache, request))
    slot = verify(cache, request, [1, 2, 3, 4, 5, 6])
    hit = cache.match(ask([*request.tokens, 9, 9, 9]))
    assert (request.seen, hit.tokens, hit.node.state) == (22, 20, slot)


def test_a_state_that_was_planned_and_not_reached_goes_back():
    """The forward failed after the verdict was asked for, and the second verdict keeps nothing."""
    cache = make()
    request = ask(text(16))
    commit(cache, request, begin(cache, request))
    used = cache.checkpoints.used
    cache.grow(request, 8)
    slot = cache.checkpoint(request, 20)
    assert slot == cache.checkpoint(request, 20)
    request.seen += 1
    request.tokens.append(1)
    cache.advance(request)
    assert cache.checkpoints.used == used
    cache.check()


def test_no_order_touches_a_slot_that_is_planned_after_the_forward():
    cache = make(checkpoints=1, poison=True)
    serve(cache, text(9))
    request = ask(text(16, 50))
    commit(cache, request, begin(cache, request))
    cache.take_writes()
    cache.grow(request, 8)
    slot = cache.checkpoint(request, 20)
    assert slot > 0
    assert cache.take_writes() == []


def test_a_planned_slot_of_a_chunk_is_poisoned_until_it_is_written():
    cache = make(poison=True)
    request = ask(text(20))
    begin(cache, request)
    slot = cache.holding(request).planned.slot
    assert Poison([slot], []) in cache.take_writes()


def test_a_decoding_request_rolls_one_state_and_leaves_those_of_the_grid():
    cache = make(block=16)
    request = ask(text(9))
    commit(cache, request, begin(cache, request))
    used = []
    while len(request.tokens) < 45:
        commit(cache, request, go_on(cache, request))
        used.append((request.seen, cache.checkpoints.used))
    found = {n.tokens for n in cache.index if n.state}
    assert found == {8, 16, 32, 44}
    assert dict(used)[28] == 3  # 8, 16 and the one that rolls
    cache.release(request)
    assert cache.match(ask([*request.tokens, 5])).tokens == 44


def test_a_rolling_state_that_somebody_went_on_from_stays():
    cache = make(block=32)
    request = ask(text(9))
    commit(cache, request, begin(cache, request))
    while request.seen < 12:
        commit(cache, request, go_on(cache, request))
    other = ask([*request.tokens, 9])
    begin(cache, other)
    assert other.seen == 12
    while request.seen < 20:
        commit(cache, request, go_on(cache, request))
    assert {n.tokens for n in cache.index if n.state} == {8, 12, 20}


def test_a_state_that_another_rolls_now_is_still_its():
    """The first lost its state there to an eviction; moving on, it must not make the second's one stay."""
    cache = make(block=32)
    first, second = ask(text(9)), ask(text(9))
    commit(cache, first, begin(cache, first))
    while first.seen < 12:
        commit(cache, first, go_on(cache, first))
    while cache.index.evict_state():
        pass
    commit(cache, second, begin(cache, second))
    for request in (second, first, second, second):
        end = request.seen // UNIT * UNIT + UNIT
        while request.seen < end:
            commit(cache, request, go_on(cache, request))
    assert (first.seen, second.seen, first.tokens[:16]) == (16, 20, second.tokens[:16])
    assert {n.tokens for n in cache.index if n.state} == {8, 16, 20}


def test_the_copy_of_the_end_state_reads_the_slot_where_the_state_is():
    cache = make(slots_per_request=3, requests=3)
    request = ask(text(9))
    commit(cache, request, begin(cache, request))
    holding = cache.holding(request)
    assert len(holding.slots) == 3
    while request.seen < 11:
        commit(cache, request, go_on(cache, request))
    cache.take_writes()
    holding.slot = holding.slots[2]  # as after a verified row without replay
    commit(cache, request, go_on(cache, request))
    (copy,) = cache.take_writes()
    assert copy.sources == [holding.slots[2]]
    late = ask(text(4))
    assert not cache.admit(late, NO_HIT, 4)  # one slot is not enough


def test_published_nodes_are_told_once_with_what_is_to_be_kept():
    cache = make(block=32)
    serve(cache, text(9))
    assert cache.take_published() == []
    cache.index.record = True
    request = ask(text(9, 50))
    commit(cache, request, begin(cache, request))
    assert [(n.tokens, bool(n.state)) for n in cache.take_published()] == [(4, False), (8, True)]
    while request.seen < 13:
        commit(cache, request, go_on(cache, request))
    assert [n.tokens for n in cache.take_published()] == [12]
    cache.release(request)
    assert [(n.tokens, bool(n.state)) for n in cache.take_published()] == [(12, True)]
    assert cache.take_published() == []


def test_every_state_that_is_not_made_is_counted_by_its_reason():
    cache = make(checkpoints=1, retention_interval=0)
    cache.index.pin(cache_state(cache))
    request = ask(text(40, 50))
    begin(cache, request, budget=24)  # 24 is neither an end nor a junction
    assert cache.declines == {"not retained": 1}
    commit(cache, request, 24)
    go_on(cache, request)
    assert cache.declines["no checkpoint slot"] == 1


def cache_state(cache: Cache):
    """The only state that fits."""
    serve(cache, text(9))
    return cache.match(ask(text(9))).node
