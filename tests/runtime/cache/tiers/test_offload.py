"""Stores and loads run beside the engine; whatever fails, nothing wrong is loaded and nobody waits long."""

import random
import threading
import time

import pytest
import torch
from k3compile.runtime.cache.pools import KdaPools, MlaPools
from k3compile.runtime.cache.tiers.disk import DiskTier
from k3compile.runtime.cache.tiers.disk_file import file_name
from k3compile.runtime.cache.tiers.entry import Key, nbytes
from k3compile.runtime.cache.tiers.host import HostTier
from k3compile.runtime.cache.tiers.offload import Offer, Offload
from k3compile.runtime.cache.tiers.pool_io import PoolIO
from tier_entries import FINGERPRINT, bits, chain

UNIT = 4
HASHES = chain(6)


def make_pools() -> list:
    torch.manual_seed(0)
    kda = KdaPools(
        *(torch.randn(9, *s) for s in [(2, 3, 5), (3, 9), (1, 2, 3), (1, 2, 5), (1, 2, 5), (1, 9)])
    )
    return [kda, MlaPools(torch.randn(20, 2, 7))]


def make(folder=None, host: int = 1 << 20, **settings) -> Offload:
    """An offload over pools of its own. folder: of a disk tier."""
    io = PoolIO(make_pools(), UNIT)
    disk = DiskTier(folder, 1 << 20, FINGERPRINT, io.nbytes("pages") + io.nbytes("state")) if folder else None
    return Offload(io, UNIT, HostTier(host) if host else None, disk, **settings)


def pools_of(offload: Offload) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """state, window, pages"""
    io = offload.io
    return io._slotted["state"][0], io._slotted["window"][0], io._paged["latents"][0]


def block(i: int, state: bool = True) -> Offer:
    """Block i of the prefix lies in pages 2i + 1 and 2i + 2, and the state after it in slot i + 1."""
    return Offer(HASHES[i], HASHES[i - 1] if i else None, (2 * i + 1, 2 * i + 2), i + 1 if state else 0)


def store(offload: Offload, *offers: Offer) -> list[Offer]:
    """Store and wait until it is done: the offers whose done() was called."""
    done: list[Offer] = []
    for offer in offers:
        offload.offer(offer, lambda offer=offer: done.append(offer))
    offload.flush()
    settle(offload)
    return done


def settle(offload: Offload) -> None:
    """Until the store thread has nothing in hand and every done() was called."""
    assert offload.drain(20)
    assert offload._pinned == 0


def arrive(offload: Offload, wait_s: float = 20.0):
    """The one load that is under way."""
    deadline = time.monotonic() + wait_s
    while not (loads := offload.poll(1.0)):
        assert time.monotonic() < deadline, "the load does not arrive"
    assert len(loads) == 1
    return loads[0]


def load(offload: Offload, start: int, end: int, id: str = "r"):
    assert offload.start_load(id, HASHES, start * UNIT, end * UNIT)
    return arrive(offload)


def holds(offload: Offload, first: int, end: int, pages: list[int], slot: int, source: Offload) -> bool:
    """Whether pages and slot are now what ``source`` had for blocks [first, end)."""
    state, window, latents = pools_of(offload)
    old_state, old_window, old_latents = pools_of(source)
    wanted = [page for i in range(first, end) for page in block(i).pages]
    return (
        bits(latents[pages]) == bits(old_latents[wanted])
        and bits(state[slot]) == bits(old_state[end])
        and bits(window[slot]) == bits(old_window[end])
    )


@pytest.mark.parametrize("tiers", ["host", "disk", "both"])
def test_a_prefix_comes_back_bit_for_bit_into_other_pages_and_another_slot(tmp_path, tiers):
    offload = make(tmp_path if tiers != "host" else None, host=0 if tiers == "disk" else 1 << 20)
    offers = [block(i) for i in range(3)]
    assert store(offload, *offers) == offers
    assert offload.longest(HASHES, 0) == 12
    loaded = load(offload, 1, 3)
    assert loaded.failed is None
    source = make()
    offload.write(loaded, [15, 16, 17, 18], 8)
    assert holds(offload, 1, 3, [15, 16, 17, 18], 8, source)
    stats = offload.stats()
    assert stats.loads == {"done": 1}
    assert stats.loaded_tokens == 8
    assert sum(stats.loaded.values()) == 3
    assert (stats.store_declined, stats.load_declined, stats.queued, stats.loading) == ({}, {}, 0, 0)
    offload.close()
    source.close()


def test_a_prefix_is_found_after_a_restart_and_the_host_gets_what_was_read(tmp_path):
    first = make(tmp_path)
    store(first, *(block(i) for i in range(3)))
    first.close()
    second = make(tmp_path)
    for tensor in pools_of(second):
        tensor.zero_()
    assert second.longest(HASHES, 4) == 12
    second.write(load(second, 0, 3), [9, 10, 11, 12, 13, 14], 7)
    assert holds(second, 0, 3, [9, 10, 11, 12, 13, 14], 7, first)
    assert second.stats().loaded == {"disk": 4}
    load(second, 0, 3)
    assert second.stats().loaded == {"disk": 4, "host": 4}
    second.close()


def test_a_prefix_can_be_loaded_only_where_all_pages_and_the_state_at_its_end_are():
    offload = make()
    store(offload, block(0, state=False), block(1), block(2, state=False))
    assert offload.longest(HASHES, 0) == 8  # block 2 has no state
    assert offload.longest(HASHES[:1], 0) == 0
    assert offload.longest(HASHES, 8) == 8
    store(offload, block(4))
    assert offload.longest(HASHES, 0) == 8  # block 3 is missing
    assert offload.longest(HASHES, 16) == 20
    store(offload, block(3, state=False))
    assert offload.longest(HASHES, 0) == 20
    store(offload, Offer(HASHES[2], HASHES[1], (), 3))
    assert offload.longest(HASHES[:3], 0) == 12
    offload.close()


def test_a_state_without_its_pages_is_no_prefix():
    offload = make()
    store(offload, Offer(HASHES[0], None, (), 1))
    assert offload.longest(HASHES, 0) == 0
    offload.close()


def test_what_is_written_between_the_offer_and_the_flush_is_stored():
    offload = make()
    offload.offer(block(0), lambda: None)
    state, _, pages = pools_of(offload)
    time.sleep(0.05)
    state[1], pages[1] = 3.0, 5.0  # the cache applies its writes after commit
    offload.flush()
    settle(offload)
    loaded = load(offload, 0, 1)
    assert (loaded.state["state"] == 3.0).all()
    assert (loaded.pages["latents"][0, 0] == 5.0).all()
    offload.close()


class Gate:
    """Stops a method until opened, and may make it fail."""

    def __init__(self, owner: object, name: str, error: Exception | None = None) -> None:
        self.reached, self.opened, self.error = threading.Event(), threading.Event(), error
        self.real = getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *arguments):
        self.reached.set()
        assert self.opened.wait(30)
        if self.error is not None:
            raise self.error
        return self.real(*arguments)


def test_a_block_stays_pinned_until_it_is_copied_and_no_longer(tmp_path):
    offload, done = make(tmp_path), []
    copying, writing = Gate(offload.io, "read_pages"), Gate(offload.disk, "put")
    assert offload.offer(block(0), lambda: done.append(0))
    offload.flush()
    assert copying.reached.wait(10)
    offload.poll()
    assert done == []
    assert offload.longest(HASHES, 0) == 0  # not whole yet
    copying.opened.set()
    assert writing.reached.wait(10)
    offload.poll()
    assert done == [0]  # the disk is still being written
    writing.opened.set()
    settle(offload)
    assert offload.stats().stored == {"host": 2, "disk": 2}
    offload.close()


def test_a_full_queue_declines_and_does_not_call_done():
    offload, done = make(queue=2), []
    gate = Gate(offload.io, "read_pages")
    taken = [offload.offer(block(i), lambda i=i: done.append(i)) for i in range(4)]
    assert taken == [True, True, False, False]
    offload.flush()
    assert not offload.offer(block(3), lambda: done.append(3))
    gate.opened.set()
    settle(offload)
    assert done == [0, 1]
    assert offload.stats().store_declined == {"queue_full": 3}
    assert store(offload, block(2)) == [block(2)]
    offload.close()


def test_what_is_there_already_is_not_pinned_and_half_of_an_offer_is_completed():
    offload = make()
    store(offload, block(0, state=False))
    assert not offload.offer(block(0, state=False), lambda: None)
    assert store(offload, block(0)) == [block(0)]
    stats = offload.stats()
    assert (stats.stored, stats.store_declined) == ({"host": 2}, {"present": 1}), "stored counts tiers only"
    assert not offload.offer(Offer(HASHES[0], None, (), 0), lambda: None)
    offload.close()


def test_a_copy_that_fails_lets_the_block_go_and_the_next_is_stored():
    offload = make()
    gate = Gate(offload.io, "read_pages", RuntimeError("device lost"))
    gate.opened.set()
    assert store(offload, block(0)) == [block(0)]
    assert offload.stats().store_declined == {"error": 1}
    gate.error = None
    store(offload, block(0))
    assert offload.longest(HASHES, 0) == 4
    offload.close()


def test_every_reason_of_a_tier_is_counted():
    offload = make(host=nbytes(make().io.read_pages([1, 2])) - 1)
    store(offload, block(0, state=False))
    assert offload.stats().store_declined == {"too_big": 1}
    offload.close()


def spoil_checksum(offload: Offload, key: Key) -> None:
    path = offload.disk.folder / file_name(key, FINGERPRINT)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def spoil_length(offload: Offload, key: Key) -> None:
    path = offload.disk.folder / file_name(key, FINGERPRINT)
    path.write_bytes(path.read_bytes()[:-1])


def spoil_file(offload: Offload, key: Key) -> None:
    (offload.disk.folder / file_name(key, FINGERPRINT)).unlink()


def spoil_shape(offload: Offload, key: Key) -> None:
    """A whole file of ours that does not fit the pools."""
    spoil_file(offload, key)
    offload.disk._forget(file_name(key, FINGERPRINT))
    offload.disk.put(key, {"latents": torch.zeros(3)}, None)


@pytest.mark.parametrize("kind", ["pages", "state"])
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (spoil_checksum, "checksum"),
        (spoil_length, "torn"),
        (spoil_file, "not_found"),
        (spoil_shape, "foreign"),
    ],
)
def test_a_load_of_which_any_part_is_bad_fails_as_a_whole(tmp_path, spoil, reason, kind):
    offload = make(tmp_path, host=0)
    store(offload, *(block(i) for i in range(3)))
    spoil(offload, Key(HASHES[2 if kind == "state" else 1], kind))
    loaded = load(offload, 0, 3)
    assert loaded.failed == reason
    assert offload.stats().loads == {"failed": 1}
    assert offload.stats().load_declined == {reason: 1}
    with pytest.raises(AssertionError):
        offload.write(loaded, [15, 16, 17, 18, 19], 8)
    offload.close()


def test_an_unforeseen_error_fails_the_load_and_not_the_thread(tmp_path):
    offload = make(tmp_path, host=0)
    store(offload, block(0))
    gate = Gate(offload.disk, "get", ZeroDivisionError("a mistake of ours"))
    gate.opened.set()
    assert load(offload, 0, 1).failed == "error"
    assert offload.stats().load_declined == {"error": 1}
    gate.error = None
    assert load(offload, 0, 1).failed is None
    offload.close()


def test_an_entry_that_leaves_before_it_is_read_fails_the_load():
    offload = make()
    store(offload, block(0))
    offload.host._books.remove(Key(HASHES[0], "state"))
    del offload.host._entries[Key(HASHES[0], "state")]
    loaded = load(offload, 0, 1)
    assert loaded.failed == "not_found"
    offload.close()


def test_a_cancelled_load_is_never_returned_and_the_id_may_load_again():
    offload = make()
    store(offload, block(0), block(1))
    gate = Gate(offload.host, "get")
    offload.start_load("r", HASHES, 0, 8)
    assert gate.reached.wait(10)
    assert offload.cancel("r")
    assert not offload.cancel("r")
    assert offload.start_load("r", HASHES, 0, 4)
    gate.opened.set()
    assert arrive(offload).end == 4
    time.sleep(0.05)
    assert offload.poll() == []
    assert offload.stats().loads == {"cancelled": 1, "done": 1}
    offload.close()


def test_a_load_that_hangs_fails_in_time_and_its_late_result_is_dropped():
    offload = make(timeout_s=0.3)
    store(offload, block(0))
    gate = Gate(offload.host, "get")
    begun = time.monotonic()
    loaded = load(offload, 0, 1)
    assert loaded.failed == "timeout"
    assert time.monotonic() - begun < 5
    gate.opened.set()
    time.sleep(0.05)
    assert offload.poll() == []
    assert loaded.failed == "timeout"
    assert offload.longest(HASHES, 0) == 0  # whoever asks now does not wait for the same disk
    offload._trust_after = 0.0
    assert offload.longest(HASHES, 0) == 4
    assert load(offload, 0, 1).failed is None
    offload.close()


def test_no_more_requests_load_at_once_than_allowed():
    offload = make(loads=1)
    store(offload, block(0))
    gate = Gate(offload.host, "get")
    assert offload.start_load("a", HASHES, 0, 4)
    assert not offload.start_load("b", HASHES, 0, 4)
    gate.opened.set()
    assert arrive(offload).request_id == "a"
    assert offload.start_load("b", HASHES, 0, 4)
    assert arrive(offload).request_id == "b"
    assert offload.stats().load_declined == {"busy": 1}
    offload.close()


def test_somebody_is_woken_when_a_load_arrives():
    woken = threading.Event()
    offload = make(on_ready=woken.set)
    store(offload, block(0))
    woken.clear()
    offload.start_load("a", HASHES, 0, 4)
    assert woken.wait(10)
    assert [x.request_id for x in offload.poll()] == ["a"]
    offload.close()


def test_closing_drains_what_it_can_and_lets_everything_go():
    offload, done = make(), []
    gate = Gate(offload.io, "read_pages")
    for i in range(4):
        offload.offer(block(i), lambda i=i: done.append(i))
    offload.start_load("a", HASHES, 0, 4)
    threading.Timer(0.2, gate.opened.set).start()
    offload.close(drain_s=20)
    assert done == [0, 1, 2, 3]
    assert offload.longest(HASHES, 0) == 16
    assert not any(w.alive for w in (offload._storer, offload._writer, offload._loader))
    assert not offload.offer(block(5), lambda: done.append(5))
    assert not offload.start_load("b", HASHES, 0, 4)
    offload.close()


def test_closing_ends_in_time_when_a_store_hangs():
    offload, done = make(), []
    gate = Gate(offload.io, "read_pages")
    for i in range(3):
        offload.offer(block(i), lambda i=i: done.append(i))
    offload.flush()
    assert gate.reached.wait(10)
    begun = time.monotonic()
    offload.close(drain_s=0.2)
    assert time.monotonic() - begun < 8
    assert done == [1, 2]  # nobody knows when block 0 is read, so it stays pinned
    assert offload.stats().store_declined == {"closed": 2}
    gate.opened.set()


def test_an_offload_without_a_tier_is_refused():
    with pytest.raises(ValueError, match="a host tier, a disk tier or both"):
        make(host=0)


def test_random_traffic_loads_only_what_was_published(tmp_path):
    """Pages and states are functions of their prefix, so whatever is loaded can be checked by itself."""
    rng = random.Random(0)
    offload = make(tmp_path, host=2000, queue=4)
    state, window, pages = pools_of(offload)
    prefixes = [chain(5, name) for name in "abcd"]
    value = {h: float(i) for i, h in enumerate(h for hashes in prefixes for h in hashes)}
    free, held, seen = list(range(1, 9)), {}, {"done": 0, "failed": 0}

    def release(i: int) -> None:
        state[i] = window[i] = pages[2 * i] = pages[2 * i + 1] = torch.nan
        free.append(i)

    for _ in range(600):
        hashes = rng.choice(prefixes)
        at = rng.randrange(5)
        if rng.random() < 0.7 and free:
            i = free.pop()
            state[i] = window[i] = pages[2 * i] = pages[2 * i + 1] = value[hashes[at]]
            offer = Offer(hashes[at], hashes[at - 1] if at else None, (2 * i, 2 * i + 1), i)
            if not offload.offer(offer, lambda i=i: release(i)):
                release(i)
        else:
            end = offload.longest(hashes, 0)
            if end and offload.start_load(f"{len(held)}", hashes, 0, end):
                held[f"{len(held)}"] = hashes
        offload.flush()
        for loaded in offload.poll(0.001):
            seen["failed" if loaded.failed else "done"] += 1
            if loaded.failed:
                assert loaded.failed == "not_found", loaded.failed
                continue
            hashes = held[loaded.request_id]
            blocks = loaded.end // UNIT
            assert (loaded.state["state"] == value[hashes[blocks - 1]]).all()
            assert (loaded.state["window"] == value[hashes[blocks - 1]]).all()
            got = loaded.pages["latents"][0, :, 0, 0].tolist()
            assert got == [value[h] for h in hashes[:blocks] for _ in range(2)]
    offload.close(5)
    assert sorted(free) == list(range(1, 9))
    assert seen["done"] > 50
    assert offload.host.bytes <= 2000


def test_the_first_decline_of_a_kind_is_told(caplog):
    offload = make(queue=0)
    offload.offer(block(0), lambda: None)
    offload.offer(block(0), lambda: None)
    (record,) = caplog.records
    assert "queue_full: 0 blocks wait to be stored" in record.getMessage()
    offload.close()
