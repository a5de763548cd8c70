"""Latent pages and KDA states, owned together: a request has both or neither, a hit gives both or neither.

    request A   slot 3   pages [7, 2, 9]     tokens 0 ..< 3 * page_size fit; 7 and 2 are the index's
    index       7 -- 2   checkpoint 21       the state after both blocks, which B copied into its own slot
    request B   slot 1   pages [7, 2, 4]
    nobody      slot 0   page 0              null: padding and warm-up write there

    match -> admit -> [checkpoint] forward [checkpoint] -> advance ... -> release
    hit      locks     of a chunk           of verify     publishes      unlocks

A block is published when the step that ran its last token is committed, never earlier, and is immutable from
then on; a state is published with the token count it was written for. What must happen in the pools is a list
of orders (:meth:`Cache.take_writes`) that the engine carries out after each commit and before each forward.
No torch here.
"""

from __future__ import annotations

from array import array
from collections import Counter
from weakref import WeakKeyDictionary

from ..request import Request
from .checkpoints import Grid, last_hit
from .free_list import FreeList
from .hashes import Chain
from .holding import NO_HIT, Hit, Holding
from .index import PrefixIndex
from .node import Node
from .orders import Order, Orders
from .retention import Retention
from .states import KeptStates

__all__ = ["NO_HIT", "Cache", "Hit", "Holding"]

PATIENCE = 4  # steps in a row that a request waits for a prefix without getting any


class Cache:
    """The books of ``num_pages`` pages of ``page_size`` tokens and ``num_slots`` slots, number 0 of each
    reserved, and of ``num_checkpoints`` slots above them.

    grid: token counts of hits and states (None: no prefix is kept). retention_interval: see
    :class:`Retention`. slots_per_request: more than one where a request keeps the states of its drafts.
    poison: order NaN for what is freed, so that a read of something freed cannot go unnoticed. Raises
    ValueError for sizes that do not go together.
    """

    def __init__(
        self,
        num_pages: int,
        num_slots: int,
        page_size: int,
        *,
        poison: bool = False,
        grid: Grid | None = None,
        num_checkpoints: int = 0,
        retention_interval: int | None = None,
        slots_per_request: int = 1,
    ) -> None:
        refuse(page_size, grid, num_checkpoints)
        self.page_size = page_size
        self.grid = grid
        self.slots_per_request = slots_per_request
        self.total_slots = num_slots + num_checkpoints
        self.pages = FreeList(num_pages, "page")
        self.slots = FreeList(num_slots, "slot")
        self.checkpoints = FreeList(self.total_slots, "checkpoint slot", first=num_slots)
        self.declines: Counter[str] = Counter()  # by reason
        self.counts: Counter[str] = Counter()  # matched requests, their tokens, what they hit
        self._orders = Orders(poison)
        self.index = PrefixIndex(self.pages, self.checkpoints, self._orders)
        self.retention = Retention(grid, retention_interval) if grid else None
        self.states = KeptStates(self.index, self.checkpoints, self._orders, self.retention, self.declines)
        self._held: dict[Request, Holding] = {}
        self._chains: WeakKeyDictionary[Request, Chain] = WeakKeyDictionary()

    @property
    def capacity(self) -> int:
        """Tokens that all pages together hold."""
        return (self.pages.size - 1) * self.page_size

    @property
    def available(self) -> int:
        """Pages that can be had: the free ones, and those of prefixes that nobody uses."""
        return len(self.pages) + self.index.idle_pages

    def pages_for(self, tokens: int) -> int:
        """Pages that ``tokens`` tokens take."""
        return -(-tokens // self.page_size)

    def holding(self, request: Request) -> Holding:
        """What an admitted request owns."""
        return self._held[request]

    def junction(self, request: Request) -> int:
        """Token count where a request leaves a state because others part from it there; 0 for none."""
        holding = self._held.get(request)
        return holding.junction if holding else 0

    def chain(self, request: Request) -> Chain:
        """The keys of a request's prefixes, in blocks of the unit."""
        chain = self._chains.get(request)
        if chain is None:
            chain = self._chains[request] = Chain(request.tokens, request.cache_salt, self.grid.unit)
        return chain

    def match(self, request: Request) -> Hit:
        """The longest prefix with latents and state that leaves a token to run. Nothing is taken: use it in
        the same plan.
        """
        if self.grid is None:
            return NO_HIT
        unit = self.grid.unit
        node = self.index.deepest(self.chain(request), last_hit(len(request.tokens), unit) // unit)
        matched = node.tokens if node else 0
        while node is not None and not node.state:
            node = node.parent
        return Hit(node.tokens, matched, node) if node else Hit(matched=matched)

    def deferred(self, request: Request, hit: Hit) -> bool:
        """Whether a waiting request should be left out of this step, because another makes the state of a
        longer prefix of it right now. Each wait must bring a longer hit, or the request gets on without.
        """
        if not self.states.pending:
            return False
        chain, unit = self.chain(request), self.grid.unit
        longest = last_hit(len(request.tokens), unit)
        better = any(
            hit.tokens < tokens <= longest and chain.key(tokens // unit) == key
            for key, tokens in self.states.pending.items()
        )
        if not better:
            return False
        chain.stalls = chain.stalls + 1 if hit.tokens <= chain.stalled_at else 0
        chain.stalled_at = hit.tokens
        self.declines["deferred"] += 1
        return chain.stalls < PATIENCE

    def admit(self, request: Request, hit: Hit, count: int, reserve: int = 0) -> bool:
        """Give a request a slot with the hit's state, the hit's pages, and pages for ``count`` tokens after
        them; or nothing and return False.

        ``request.seen`` is ``hit.tokens``. It gets in only when all its known tokens would fit beside
        ``reserve`` more pages: a prompt let in to be thrown out half-way does its work twice.
        """
        assert request not in self._held, f"{request!r} is admitted twice"
        assert request.seen == hit.tokens, f"{request!r} is admitted with a hit of {hit.tokens} tokens"
        if len(self.slots) < self.slots_per_request:
            self.declines["no slot"] += 1
            return False
        index, found = self.index, self.pages_for(hit.tokens)
        wanted = self.pages_for(len(request.tokens)) - found + reserve
        if wanted > self.available or wanted > self.available - index.idle_pages_of(hit.node):
            self.declines["no pages"] += 1
            return False
        index.lock(hit.node)
        slots = self.slots.take(request, self.slots_per_request)
        pages = array("q", path_pages(hit.node))
        pages.extend(self._take_pages(request, self.pages_for(hit.tokens + count) - found))
        blocks = hit.tokens // self.grid.unit if self.grid else 0
        self._held[request] = Holding(slots[0], slots, pages, hit.node, blocks, hit.junction)
        if hit.node is None:
            self._orders.clear(slots[0])
        else:
            self._orders.copy(hit.node.state, slots[0])
            hit.node.rolling = None
            index.touch_state(hit.node)
            self.counts["hits"] += 1
        self.counts["admissions"] += 1
        self.counts["tokens"] += len(request.tokens)
        self.counts["hit_tokens"] += hit.tokens
        return True

    def grow(self, request: Request, count: int) -> Holding | None:
        """Make room for tokens [seen, seen + count): what the request now holds, or None (and no change)."""
        holding = self._held[request]
        missing = -(-(request.seen + count) // self.page_size) - len(holding.pages)
        if missing > 0:
            if missing > self.available:
                return None
            holding.pages.extend(self._take_pages(request, missing))
        return holding

    def checkpoint(self, request: Request, tokens: int) -> int:
        """A slot that this step must fill with the state after ``tokens`` tokens; 0 when none is wanted or
        to be had.

        Asked in the plan for a chunk, and for verified rows when it is known how far they count. Asked again,
        the answer is the same. :meth:`advance` publishes it if the request really got so far.
        """
        return self.states.plan(request, self._held[request], self.chain(request), tokens)

    def keeps(self, request: Request, tokens: int) -> bool:
        """Whether the state of a prompt after ``tokens`` tokens would be worth a slot."""
        return self.retention.wants(tokens, request.prompt_tokens, len(request.tokens), 0)

    def advance(self, request: Request, loaded: bool = False) -> None:
        """Publish what the request has run: whole blocks below ``seen``, and their states.

        ``seen`` and ``tokens`` hold what is kept, no rejected draft and nothing past a stop. loaded: its
        slot and pages were filled from elsewhere up to ``seen``, which counts like having run them.
        """
        if self.grid is None:
            return
        holding, unit = self._held[request], self.grid.unit
        if holding.planned is None and request.seen < (holding.blocks + 1) * unit:
            return  # as in most steps of a request that decodes
        chain, width = self.chain(request), unit // self.page_size
        for n in range(holding.blocks + 1, request.seen // unit + 1):
            key, tip = chain.key(n), holding.tip
            node = self.index.get(key)
            if node is None:
                pages = holding.pages[(n - 1) * width : n * width]
                node = self.index.publish(request, key, tip, n * unit, pages)
            else:
                self._adopt(request, holding, node, (n - 1) * width)
            self.index.lock(node)
            self.index.unlock(tip)
            holding.tip, holding.blocks = node, n
        self.states.settle(request, holding, chain)
        if (request.unseen <= 1 or loaded) and request.seen and request.seen % unit == 0:
            self.states.keep_end(request, holding, rolling=not loaded)

    def unchanged_until(self, request: Request) -> int:
        """Tokens that a decoding request may have seen before it needs a page or fills a block."""
        holding = self._held[request]
        fits = len(holding.pages) * self.page_size
        return fits if self.grid is None else min(fits, (holding.blocks + 1) * self.grid.unit)

    def release(self, request: Request) -> None:
        """Take everything back from a request; one that holds nothing is fine. What it published stays."""
        holding = self._held.pop(request, None)
        if holding is None:
            return
        self.states.leave(request, holding)
        self.index.unlock(holding.tip)
        own = [p for p in holding.pages if self.pages.owner(p) is request]
        self.pages.give(request, reversed(own))
        self.slots.give(request, reversed(holding.slots))
        self._orders.poison(holding.slots, own)

    def drop(self) -> None:
        """Forget every prefix that nobody uses."""
        self.index.evict_pages(self.index.idle_pages)
        while self.index.evict_state():
            pass

    def take_writes(self) -> list[Order]:
        """What to do in the pools, in this order, before anything else happens to them."""
        return self._orders.take()

    def take_published(self) -> list[Node]:
        """Nodes that got pages or a state to keep since the last call, while ``index.record`` is set.

        Ask when the writes are done, before the next plan.
        """
        return self.index.take_told()

    def check(self) -> None:
        """Walk every page, slot and node and hold them against the requests; AssertionError names what is
        wrong.
        """
        held = self._held.items()
        own = {r: [p for p in h.pages if self.pages.owner(p) is r] for r, h in held}
        self.pages.check({**own, **{node: node.pages for node in self.index}})
        self.slots.check({request: holding.slots for request, holding in held})
        planned = {r: [h.planned.slot] for r, h in held if h.planned}
        self.checkpoints.check({**planned, **{n: [n.state] for n in self.index if n.state}})
        self.index.check(holding.tip for _, holding in held)
        pending = {h.planned.key: h.planned.tokens for _, h in held if h.planned and h.planned.key}
        assert self.states.pending == pending, "a state is waited for that nobody makes"
        for request, holding in held:
            fits = len(holding.pages) * self.page_size
            assert request.seen <= fits, f"{request!r} has seen more than its {len(holding.pages)} pages hold"
            assert holding.slot in holding.slots, f"the state of {request!r} is in a slot of somebody else"
            shared = path_pages(holding.tip)
            assert holding.pages[: len(shared)].tolist() == shared, (
                f"{request!r} reads pages that are not its"
            )
            rest = holding.pages[len(shared) :]
            assert all(self.pages.owner(p) is request for p in rest), f"{request!r} writes others' pages"

    def _adopt(self, request: Request, holding: Holding, node: Node, first: int) -> None:
        """Another was first: read its pages and give the request's own back. With both kept, a request could
        need more pages than there are and run the same tokens for ever.
        """
        own = holding.pages[first : first + len(node.pages)]
        holding.pages[first : first + len(node.pages)] = array("q", node.pages)
        self.pages.give(request, reversed(own))
        self._orders.poison(pages=own)

    def _take_pages(self, request: Request, count: int) -> list[int]:
        if count > len(self.pages):
            self.index.evict_pages(count - len(self.pages))
        return self.pages.take(request, count)


def refuse(page_size: int, grid: Grid | None, num_checkpoints: int) -> None:
    """Raise a ValueError for sizes that do not go together."""
    if page_size < 1:
        raise ValueError(f"page_size must be at least 1 token, got {page_size}")
    if grid is None:
        return
    if grid.unit % page_size:
        raise ValueError(
            f"prefix_match_unit={grid.unit} is no multiple of page_size={page_size}: hits end where pages do"
        )
    if num_checkpoints < 1:
        raise ValueError(f"num_checkpoints={num_checkpoints} leaves nowhere to keep a state: give 1 or more")


def path_pages(node: Node | None) -> list[int]:
    """The pages of a prefix, in token order."""
    parts: list[tuple[int, ...]] = []
    while node is not None:
        parts.append(node.pages)
        node = node.parent
    return [page for part in reversed(parts) for page in part]
