"""Thousands of random operations over few slots: whatever is read was written for its reader (H05)."""

import os

import pytest
from cache_machine import Geometry, Machine
from k3compile.runtime.cache.cache import Cache
from k3compile.runtime.cache.hashes import Chain
from k3compile.runtime.cache.index import PrefixIndex

FULL = bool(os.environ.get("K3_ACCEPT"))
OPERATIONS = 10_000 if FULL else 1000
GEOMETRIES = {
    "exports": Geometry(),
    "splits": Geometry(exports=False),
    "one checkpoint": Geometry(checkpoints=1, pages=30),
    "no room": Geometry(pages=16, checkpoints=2),
    "prompt ends only": Geometry(retention=0, unit=2),
    "coarse": Geometry(unit=8, alignment=4, retention=16),
    "without poison": Geometry(poison=False, unit=2, drafts=5),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_few_hundred_operations_keep_books_and_contents(name):
    Machine(1, GEOMETRIES[name]).run(300)


@pytest.mark.slow
@pytest.mark.parametrize("name", GEOMETRIES)
def test_many_operations_keep_books_and_contents(name):
    Machine(2, GEOMETRIES[name]).run(OPERATIONS)


def test_the_traffic_reaches_what_it_is_for():
    machine = Machine(3)
    machine.run(600)
    wanted = {"hit", "cold", "junction", "deferred", "refused", "preempted", "boundary", "loaded"}
    assert wanted <= machine.seen_events
    counts = machine.cache.index
    assert counts.evicted_pages > 20
    assert counts.evicted_states > 5
    assert machine.cache.counts["hit_tokens"] > 200


def forgets_a_lock(monkeypatch):
    monkeypatch.setattr(PrefixIndex, "lock", lambda self, node: None)


def forgets_an_unlock(monkeypatch):
    unlock = PrefixIndex.unlock
    count = iter(range(1_000_000))
    monkeypatch.setattr(PrefixIndex, "unlock", lambda s, n: None if next(count) == 40 else unlock(s, n))


def publishes_a_block_early(monkeypatch):
    def advance(self, request, loaded=False):
        request.seen += 1  # as if the token that was only sampled had been run
        try:
            right(self, request, loaded)
        finally:
            request.seen -= 1

    right = Cache.advance
    monkeypatch.setattr(Cache, "advance", advance)


def keeps_the_state_of_rejected_rows(monkeypatch):
    """The state lies one block before its key."""

    def keep_state(self, owner, node, slot):
        right(self, owner, node.parent if node.parent and not node.parent.state else node, slot)

    right = PrefixIndex.keep_state
    monkeypatch.setattr(PrefixIndex, "keep_state", keep_state)


def forgets_the_salt(monkeypatch):
    right = Chain.__init__
    monkeypatch.setattr(Chain, "__init__", lambda self, tokens, salt, unit: right(self, tokens, "", unit))


def copies_nothing_into_the_slot(monkeypatch):
    monkeypatch.setattr("k3compile.runtime.cache.orders.Orders.copy", lambda self, source, target: None)


def sorts_the_orders(monkeypatch):
    take = Cache.take_writes
    monkeypatch.setattr(
        Cache, "take_writes", lambda self: sorted(take(self), key=lambda o: type(o).__name__, reverse=True)
    )


def run_seeds():
    for seed in range(5):
        Machine(seed).run(400)


@pytest.mark.parametrize(
    "sabotage",
    [
        forgets_a_lock,
        forgets_an_unlock,
        publishes_a_block_early,
        keeps_the_state_of_rejected_rows,
        forgets_the_salt,
        copies_nothing_into_the_slot,
        sorts_the_orders,
    ],
)
def test_the_machine_notices(sabotage, monkeypatch):
    sabotage(monkeypatch)
    with pytest.raises(AssertionError):
        run_seeds()
