"""Between the books of the cache and the tiers: what is published goes down, what a request lacks comes up.

    after a step's writes   publish()   nodes of the prefix index are pinned until they are copied
    in the plan             reach()     a longer prefix than the hit?  start()  it waits, owning pages
    before a step           bring()     into its pages and slot, or it runs from its hit
    it ends or yields       forget()

Everything here runs on the engine thread.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from ...request import Request
from ..checkpoints import last_hit
from ..node import Node
from .entry import Declined
from .offload import Load, Offer, Offload

if TYPE_CHECKING:
    from ...scheduler import Scheduler
    from ..cache import Cache
    from ..holding import Hit


WAIT_S = 0.01  # how long an engine with nothing else to do sleeps before it looks at its inbox again


class Connector:
    """Joins ``cache``, which must keep prefixes, with ``offload``, whose blocks are the units of its grid."""

    def __init__(self, cache: Cache, offload: Offload) -> None:
        assert cache.grid is not None, "offload without a prefix cache"
        assert cache.grid.unit == offload.unit, f"units {cache.grid.unit} and {offload.unit}"
        self.cache, self.offload = cache, offload
        self._asked: WeakKeyDictionary[Request, tuple[int, int]] = WeakKeyDictionary()
        self._waiting: dict[str, Request] = {}
        self._backlog: dict[Node, bool] = {}  # published and not offered yet, in order; whether with a state
        cache.index.record = True
        weakref.finalize(self, offload.abandon).atexit = False  # an engine may be dropped and not stopped

    def publish(self) -> None:
        """Offer what the index got since the last call. Its pages and states must have been written.

        What there is no place for in the queue waits without a pin: it is offered later, unless the device
        has forgotten it by then. A block that is left out makes all that follow it worthless.
        """
        self._backlog.update((node, bool(node.state)) for node in self.cache.take_published())
        self._send()

    @property
    def busy(self) -> bool:
        """Whether published blocks wait to be copied: :meth:`finished` should be called again soon."""
        return bool(self._backlog) or self.cache.index.pinned > 0

    def drain(self, wait_s: float) -> bool:
        """Wait until everything published is stored; False when that takes longer."""
        ends = time.monotonic() + wait_s
        while True:
            self._send()
            if not self.offload.drain(ends - time.monotonic()):
                return False
            if not self._backlog:
                return True

    def _send(self) -> None:
        index, offload = self.cache.index, self.offload
        while self._backlog and offload.room > 0:
            node = next(iter(self._backlog))
            had_state, there = self._backlog.pop(node), index.get(node.key) is node
            if not there or (had_state and not node.state):
                offload.tally.decline("store", Declined("evicted", "the device was faster to forget it"))
            if not there:
                continue
            index.pin(node)
            parent = node.parent.key if node.parent is not None else None
            offer = Offer(node.key, parent, node.pages, node.state)
            if not offload.offer(offer, partial(index.unpin, node)):
                index.unpin(node)
        offload.flush()

    def reach(self, request: Request, hit: Hit) -> int:
        """Tokens of the longest prefix that hit and tiers give together; hit.tokens when they have no more.

        The tiers are asked once for a request and a hit: a request may wait long and is planned every step.
        """
        asked = self._asked.get(request)
        if asked is None or asked[0] != hit.tokens:
            unit, chain = self.cache.grid.unit, self.cache.chain(request)
            blocks = last_hit(len(request.tokens), unit) // unit
            keys = [chain.key(n) for n in range(1, blocks + 1)]
            asked = self._asked[request] = (hit.tokens, self.offload.longest(keys, hit.tokens))
        return asked[1]

    def start(self, request: Request, start: int, end: int) -> bool:
        """Begin to load tokens [start, end) for an admitted request. False: it has to run them."""
        chain, unit = self.cache.chain(request), self.cache.grid.unit
        keys = [chain.key(n) for n in range(1, end // unit + 1)]
        if not self.offload.start_load(request.id, keys, start, end):
            return False
        self._waiting[request.id] = request
        return True

    def forget(self, request: Request) -> None:
        """The request gives its pages back, because it ended or starts again; any request is fine."""
        self._asked.pop(request, None)
        if self._waiting.pop(request.id, None) is not None:
            self.offload.cancel(request.id)

    def finished(self, wait_s: float = 0.0) -> list[tuple[Request, Load]]:
        """Loads that came in or failed; also lets the nodes go that have been copied, and offers others."""
        loads = self.offload.poll(wait_s)
        self._send()
        return [(self._waiting.pop(load.request_id), load) for load in loads]

    @torch.no_grad()
    def bring(self, scheduler: Scheduler, write_orders: Callable[[], None], stalled: bool) -> None:
        """Let requests run whose prefix has come, or failed to. stalled: the last plan had no work, so wait a
        moment for something to happen.
        """
        wait = stalled or (scheduler.idle and self.busy)
        for request, load in self.finished(WAIT_S if wait else 0.0):
            if load.failed is None:
                write_orders()
                self.write(request, load)
            scheduler.loaded(request, request.seen if load.failed else load.end)

    def write(self, request: Request, load: Load) -> None:
        """Put a load that did not fail into what the request owns. All orders of the cache must have been
        carried out: its slot was to be cleared, or to get the state of the hit.
        """
        holding, size = self.cache.holding(request), self.cache.page_size
        pages = holding.pages[load.start // size : load.end // size]
        self.offload.write(load, pages, holding.slot)

    def close(self, drain_s: float = 0.0) -> None:
        """Store what is left in at most so many seconds, and stop the threads."""
        ends = time.monotonic() + drain_s
        self.drain(drain_s)
        self.offload.close(max(ends - time.monotonic(), 0.0))
        for _ in self._backlog:
            self.offload.tally.decline("store", Declined("closed", "the engine stopped before it was stored"))
        self._backlog.clear()
        self._waiting.clear()
