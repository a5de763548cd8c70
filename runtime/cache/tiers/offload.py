"""Stores what the prefix index publishes and loads what it has forgotten, on threads of its own.

    engine thread                       threads
    offer()       pinned by the caller
    flush()       after the writes  ->  store: pool -> host tier          write: -> disk tier
    poll()        calls done()      <-  copied, so the node may go
    longest(), start_load()         ->  load: tier -> staging, checked
    poll(), write()                 <-  whole, or failed

The threads never write into a pool, and touch no books of the cache. So a request whose load is cancelled
gives its pages back at once, and a load that fails in any way leaves nothing behind: the request computes
what it would have computed without the tiers.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from .disk import DiskTier
from .entry import Declined, Entry, Key, nbytes
from .host import HostTier
from .pool_io import PoolIO, join_blocks
from .tally import OffloadStats, Tally
from .worker import Worker

log = logging.getLogger(__name__)

EXIT_S = 5.0  # how long a program that ends waits for what is not stored
WRITE_BYTES = 256 << 20  # copied and not yet on the disk; while there is more, nothing is copied


class Offer(NamedTuple):
    """A block of the prefix index that is written, or will be when :meth:`Offload.flush` is called."""

    hash: bytes  # chain hash after the block
    parent: bytes | None  # of the block before
    pages: tuple[int, ...]  # page ids of the block; empty: keep no pages
    slot: int  # that holds the state after the block; 0: keep no state


class Stored(NamedTuple):
    """An offer on its way."""

    offer: Offer
    done: Callable[[], None]
    fence: object  # of PoolIO.fence


class Load:
    """A prefix on its way from a tier. Read it when :meth:`Offload.poll` has returned it.

    request_id: who asked. start, end: token counts. pages [L, pages, page_size, row] of tokens [start, end)
    and the state after ``end``, or ``failed``: why there are none.
    """

    def __init__(self, request_id: str, hashes: Sequence[bytes], start: int, end: int, unit: int) -> None:
        self.request_id, self.start, self.end = request_id, start, end
        self.hashes = list(hashes[: end // unit])
        self.first = start // unit  # block
        self.pages: Entry | None = None
        self.state: Entry | None = None
        self.failed: str | None = None
        self.cancelled = False
        self.begun = time.monotonic()


class Offload:
    """Moves blocks of ``unit`` tokens between the pools behind ``io`` and the tiers.

    queue: offers that may wait, each of which pins a block; loads: requests that may load at once. timeout_s:
    a load that takes longer has failed, and for ten times as long nothing is found. on_ready: called on a
    thread of ours when :meth:`poll` has something. Apart from :meth:`stats`, one thread at a time calls.
    """

    def __init__(
        self,
        io: PoolIO,
        unit: int,
        host: HostTier | None = None,
        disk: DiskTier | None = None,
        *,
        queue: int = 128,
        loads: int = 16,
        timeout_s: float = 30.0,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        if host is None and disk is None:
            raise ValueError("offload needs a host tier, a disk tier or both")
        self.io, self.unit, self.host, self.disk = io, unit, host, disk
        self.tally = Tally()
        self._tiers = [tier for tier in (host, disk) if tier is not None]
        self._queue, self._max_loads, self._timeout_s, self._on_ready = queue, loads, timeout_s, on_ready
        self._offered: list[tuple[Offer, Callable[[], None]]] = []  # engine thread only
        self._loading: dict[str, Load] = {}  # engine thread only
        self._pinned = 0  # offers whose done() has not been called; engine thread only
        self._trust_after = 0.0  # monotonic seconds: no loads before, as one hung
        self._closed = False
        self._changed = threading.Condition()  # guards the two below
        self._copied: list[Callable[[], None]] = []
        self._arrived: list[Load] = []
        self._storer = Worker("store", self._store, partial(self._sorry, "store"))
        self._writer = Worker("write", self._write_entry, partial(self._sorry, "store"), most=WRITE_BYTES)
        self._loader = Worker("load", self._load, partial(self._sorry, "load"))
        atexit.register(close_at_exit, weakref.ref(self))

    @property
    def room(self) -> int:
        """Offers that are not declined for want of a place in the queue."""
        return self._queue - self._pinned

    def offer(self, offer: Offer, done: Callable[[], None]) -> bool:
        """Ask for a block to be stored; its pages and slot must stay as they are until ``done`` is called,
        by :meth:`poll` or :meth:`close`. False, and done is not called, when it is declined.
        """
        if self._closed or (not offer.pages and not offer.slot):
            return False
        if all(self._missing(offer, tier) == [] for tier in self._tiers):
            self.tally.add("store_declined", "present")  # nothing wrong with it: no warning
            return False
        if self._pinned >= self._queue:
            self.tally.decline("store", Declined("queue_full", f"{self._pinned} blocks wait to be stored"))
            return False
        self._pinned += 1
        self._offered.append((offer, done))
        return True

    def flush(self) -> None:
        """Hand the offers over: all that is to be written into their pages and slots has been asked for."""
        if not self._offered:
            return
        fence, offered, self._offered = self.io.fence(), self._offered, []
        for offer, done in offered:
            self._storer.put(Stored(offer, done, fence))

    def longest(self, hashes: Sequence[bytes], start: int) -> int:
        """Tokens of the longest prefix that can be loaded where ``start`` tokens are there already; ``start``
        when none is longer. hashes: chain hashes of the request's whole blocks, as many as it may be given.
        """
        if time.monotonic() < self._trust_after:
            return start
        end = first = start // self.unit
        for block in range(first, len(hashes)):
            if not self._has(Key(hashes[block], "pages")):
                break
            if self._has(Key(hashes[block], "state")):
                end = block + 1
        return max(end * self.unit, start)

    def start_load(self, request_id: str, hashes: Sequence[bytes], start: int, end: int) -> bool:
        """Begin to load pages of tokens [start, end) and the state after ``end``, both multiples of ``unit``.

        False when it is declined. Otherwise :meth:`poll` returns it once, unless it is cancelled.
        """
        assert start < end, f"nothing to load: {start} to {end}"
        assert start % self.unit == 0, f"{start} is no block boundary"
        assert end % self.unit == 0, f"{end} is no block boundary"
        assert end <= len(hashes) * self.unit, f"{len(hashes)} hashes for {end} tokens"
        assert request_id not in self._loading, f"{request_id} loads already"
        if self._closed or len(self._loading) >= self._max_loads:
            self.tally.decline("load", Declined("busy", f"{len(self._loading)} requests load already"))
            return False
        load = self._loading[request_id] = Load(request_id, hashes, start, end, self.unit)
        self._loader.put(load)
        return True

    def cancel(self, request_id: str) -> bool:
        """Forget a load: the request ended. False when there is none."""
        load = self._loading.pop(request_id, None)
        if load is None:
            return False
        load.cancelled = True
        self._count(load, "cancelled")
        return True

    @property
    def loading(self) -> int:
        """Requests whose load has not been returned."""
        return len(self._loading)

    def poll(self, wait_s: float = 0.0) -> list[Load]:
        """Loads that are whole or have failed, after calling done() of what has been copied.

        wait_s: wait so long for something to happen.
        """
        with self._changed:
            if wait_s:
                self._changed.wait_for(lambda: self._copied or self._arrived, self._until_timeout(wait_s))
            copied, self._copied = self._copied, []
            arrived, self._arrived = self._arrived, []
        self._let_go(copied)
        late = [x for x in self._loading.values() if time.monotonic() - x.begun > self._timeout_s]
        finished = [x for x in arrived if not x.cancelled]
        for load in late:
            if load not in finished:
                load.cancelled, load.failed = True, "timeout"
                self._trust_after = time.monotonic() + 10 * self._timeout_s
                self.tally.decline("load", Declined("timeout", f"{self._timeout_s} s"))
                finished.append(load)
        for load in finished:
            del self._loading[load.request_id]
            self._count(load, "failed" if load.failed else "done")
        return finished

    def write(self, load: Load, pages: Sequence[int], slot: int) -> None:
        """Write a load that did not fail into the request's pages of tokens [start, end) and its slot."""
        assert load.failed is None, load.failed
        self.io.write_pages(pages, load.pages)
        self.io.write_state(slot, load.state)

    def drain(self, wait_s: float) -> bool:
        """Wait until everything offered is stored and its done() called; False when that takes longer."""
        self.flush()
        ends = time.monotonic() + wait_s
        stored = self._storer.wait_idle(wait_s) and self._writer.wait_idle(ends - time.monotonic())
        with self._changed:
            copied, self._copied = self._copied, []
        self._let_go(copied)
        return stored

    def _let_go(self, copied: Sequence[Callable[[], None]]) -> None:
        self._pinned -= len(copied)
        for done in copied:
            done()

    def close(self, drain_s: float = 0.0) -> None:
        """Take nothing more, give what waits ``drain_s`` seconds to be stored, drop the rest."""
        self.drain(drain_s)
        self._closed = True
        dropped = self._storer.close(1.0)
        unwritten = self._writer.close(1.0)
        for _ in range(len(dropped) + len(unwritten)):
            self.tally.decline("store", Declined("closed", "the engine stopped before it was stored"))
        for request_id in list(self._loading):
            self.cancel(request_id)
        self._loader.close(1.0)
        with self._changed:
            self._copied.extend(stored.done for stored in dropped)
        self.poll()

    def abandon(self) -> None:
        """End the threads without waiting for them: nobody can ask for anything any more."""
        self._closed = True
        for worker in (self._storer, self._writer, self._loader):
            worker.close(0.0)

    def stats(self) -> OffloadStats:
        """A snapshot; thread-safe."""
        of, host, disk = self.tally.of, self.host, self.disk
        return OffloadStats(
            host_bytes=host.bytes if host else 0,
            host_entries=len(host) if host else 0,
            disk_bytes=disk.bytes if disk else 0,
            disk_entries=len(disk) if disk else 0,
            queued=self._pinned,
            loading=len(self._loading),
            stored=of("stored"),
            loaded=of("loaded"),
            loads=of("loads"),
            loaded_tokens=of("tokens").get("loaded", 0),
            store_declined=of("store_declined"),
            load_declined=of("load_declined"),
        )

    def _has(self, key: Key) -> bool:
        return any(key in tier for tier in self._tiers)

    def _missing(self, offer: Offer, tier: HostTier | DiskTier) -> list[Key]:
        """What of an offer a tier does not have."""
        wanted = [(offer.pages, "pages"), (offer.slot, "state")]
        return [key for has, kind in wanted if has and (key := Key(offer.hash, kind)) not in tier]

    def _until_timeout(self, wait_s: float) -> float:
        """Seconds to wait at most, so that a load which hangs is noticed in time."""
        ends = [load.begun + self._timeout_s - time.monotonic() for load in self._loading.values()]
        return max(min([wait_s, *ends]), 0.0)

    def _count(self, load: Load, outcome: str) -> None:
        self.tally.add("loads", outcome)
        if outcome == "done":
            self.tally.add("tokens", "loaded", load.end - load.start)

    def _sorry(self, what: str, error: Exception) -> None:
        self.tally.decline(what, Declined("error", f"{type(error).__name__}: {error}"))

    def _store(self, stored: Stored) -> None:
        offer, fence = stored.offer, stored.fence
        wanted = [(tier, self._missing(offer, tier)) for tier in self._tiers]
        entries: dict[Key, Entry] = {}
        try:
            for key in {key for _, keys in wanted for key in keys}:
                if key.kind == "pages":
                    entries[key] = self.io.read_pages(offer.pages, fence)
                else:
                    entries[key] = self.io.read_state(offer.slot, fence)
        finally:
            with self._changed:
                self._copied.append(stored.done)
                self._changed.notify_all()
            self._on_ready()
        for tier, keys in wanted:
            for key in keys:  # pages before the state that hangs below them
                if tier is self.disk:
                    self._writer.put((key, entries[key], offer.parent), nbytes(entries[key]))
                else:
                    self._put(tier, key, entries[key], offer.parent)

    def _write_entry(self, item: tuple[Key, Entry, bytes | None]) -> None:
        self._put(self.disk, *item)

    def _put(self, tier: HostTier | DiskTier, key: Key, entry: Entry, parent: bytes | None) -> None:
        try:
            tier.put(key, entry, parent)
        except Declined as error:
            self.tally.decline("store", error)
        else:
            self.tally.add("stored", tier.name)

    def _load(self, load: Load) -> None:
        try:
            blocks = []
            for block in range(load.first, len(load.hashes)):
                if load.cancelled:
                    return
                blocks.append(self._get(load, block, "pages"))
            load.state = self._get(load, len(load.hashes) - 1, "state")
            load.pages = join_blocks(blocks)
        except Declined as error:
            load.failed = error.reason
            self.tally.decline("load", error)
        except Exception as error:  # the request computes, the thread goes on
            load.failed = "error"
            self._sorry("load", error)
            log.exception("offload: a load failed")
        finally:
            with self._changed:
                self._arrived.append(load)
                self._changed.notify_all()
            self._on_ready()

    def _get(self, load: Load, block: int, kind: str) -> Entry:
        """From the host or else from the disk, in which case the host gets it too."""
        key = Key(load.hashes[block], kind)
        if self.host is not None and key in self.host:
            try:
                entry = self.host.get(key)
            except Declined:
                pass  # it went this moment; the disk may have it
            else:
                self.tally.add("loaded", "host")
                return entry
        if self.disk is None:
            raise Declined("not_found", f"block {block}, {kind}")
        entry, parent = self.disk.get(key)
        self.io.check(kind, entry)
        self.tally.add("loaded", "disk")
        if self.host is not None:
            self._put(self.host, key, entry, parent)
        return entry


def close_at_exit(offload: weakref.ref[Offload]) -> None:
    """Store what a program left that ends without stopping its engine."""
    if (left := offload()) is not None:
        left.close(EXIT_S)
