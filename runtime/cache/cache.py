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
from .holding import NO_HIT, Hit, Holding, Planned
from .index import PrefixIndex
from .node import Node
from .orders import Order, Orders
from .retention import Retention

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
        self.record_published = False
        self._orders = Orders(poison)
        self.index = PrefixIndex(self.pages, self.checkpoints, self._orders)
        self._retention = Retention(grid, retention_interval) if grid else None
        self._held: dict[Request, Holding] = {}
        self._chains: WeakKeyDictionary[Request, Chain] = WeakKeyDictionary()
        self._pending: dict[bytes, int] = {}  # token counts of the prefixes whose state this step makes
        self._published: list[Node] = []

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
        if not self._pending:
            return False
        chain, unit = self.chain(request), self.grid.unit
        longest = last_hit(len(request.tokens), unit)
        better = any(
            hit.tokens < tokens <= longest and chain.key(tokens // unit) == key
            for key, tokens in self._pending.items()
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
        holding, planned = self._held[request], self._held[request].planned
        if planned is not None:
            assert planned.tokens == tokens, f"{request!r} already leaves a state at {planned.tokens}"
            return planned.slot
        assert tokens > request.seen, f"the state of {request!r} at {tokens} is past"
        assert tokens % self.grid.unit == 0, f"no prefix of {request!r} ends at {tokens}"
        if request.unseen <= 1:  # after the forward: no order may touch the slot any more
            slot, key = self._rolling_slot(request, holding), None
        else:
            key = self.chain(request).key(tokens // self.grid.unit)
            slot = self._prefill_slot(request, holding, tokens, key)
        if not slot:
            return 0
        holding.planned = Planned(tokens, slot, key)
        if key is not None:
            self._pending[key] = tokens
            self._orders.poison(slots=[slot])
        return slot

    def advance(self, request: Request, loaded: bool = False) -> None:
        """Publish what the request has run: whole blocks below ``seen``, and their states.

        ``seen`` and ``tokens`` hold what is kept, no rejected draft and nothing past a stop. loaded: its
        slot and pages were filled from elsewhere up to ``seen``, which counts like having run them.
        """
        if self.grid is None:
            return
        holding, chain, unit = self._held[request], self.chain(request), self.grid.unit
        width = unit // self.page_size
        for n in range(holding.blocks + 1, request.seen // unit + 1):
            key, tip = chain.key(n), holding.tip
            node = self.index.get(key)
            if node is None:
                pages = holding.pages[(n - 1) * width : n * width]
                node = self.index.publish(request, key, tip, n * unit, pages)
                self._tell(node)
            else:
                self._adopt(request, holding, node, (n - 1) * width)
            self.index.lock(node)
            self.index.unlock(tip)
            holding.tip, holding.blocks = node, n
        self._settle_planned(request, holding)
        if (request.unseen <= 1 or loaded) and request.seen and request.seen % unit == 0:
            self._keep_end(request, holding, rolling=not loaded)

    def release(self, request: Request) -> None:
        """Take everything back from a request; one that holds nothing is fine. What it published stays."""
        holding = self._held.pop(request, None)
        if holding is None:
            return
        self._drop_planned(request, holding)
        self.index.unlock(holding.tip)
        if holding.rolling is not None:
            self._tell(holding.rolling)  # nothing replaces it any more
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
        """Nodes that got pages or a state to keep since the last call, while ``record_published`` is set. Ask
        when the writes are done, before the next plan.
        """
        nodes, self._published = dict.fromkeys(self._published), []
        return [node for node in nodes if self.index.get(node.key) is node]

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
        assert self._pending == pending, "a state is waited for that nobody makes"
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

    def _take_checkpoint(self, request: Request) -> int:
        if not len(self.checkpoints) and not self.index.evict_state():
            return self._decline("no checkpoint slot")
        return self.checkpoints.take(request, 1)[0]

    def _prefill_slot(self, request: Request, holding: Holding, tokens: int, key: bytes) -> int:
        """A slot for a state that is wanted and that nobody has or makes."""
        total = len(request.tokens)
        if not self._retention.wants(tokens, request.prompt_tokens, total, holding.junction):
            return self._decline("not retained")
        node = self.index.get(key)
        if node is not None and node.state:
            self.index.touch_state(node)
            return self._decline("already kept")
        if key in self._pending:
            return self._decline("made by another")
        return self._take_checkpoint(request)

    def _rolling_slot(self, request: Request, holding: Holding) -> int:
        """A slot for the newest boundary of a decoding request: the one of the boundary before, unless that
        is worth keeping.
        """
        old, holding.rolling = holding.rolling, None
        if old is not None and old.rolling is holding and not old.pins:
            self.index.lose_state(old)
        elif old is not None:
            self._tell(old)
        return self._take_checkpoint(request)

    def _settle_planned(self, request: Request, holding: Holding) -> None:
        """Publish the state that the step left, if its tokens are kept and nobody was first."""
        planned = holding.planned
        if planned is None:
            return
        if planned.tokens <= request.seen:
            node = self.index.get(self.chain(request).key(planned.tokens // self.grid.unit))
            if not node.state:
                self._forget_planned(holding)
                self.index.keep_state(request, node, planned.slot)
                self._kept(request, holding, node, rolling=planned.key is None)
                return
        self._drop_planned(request, holding)

    def _forget_planned(self, holding: Holding) -> None:
        if holding.planned is not None and holding.planned.key is not None:
            del self._pending[holding.planned.key]
        holding.planned = None

    def _drop_planned(self, request: Request, holding: Holding) -> None:
        planned = holding.planned
        if planned is not None:
            self._forget_planned(holding)
            self.checkpoints.give(request, [planned.slot])
            self._orders.poison(slots=[planned.slot])

    def _keep_end(self, request: Request, holding: Holding, rolling: bool) -> None:
        """Copy the state a request has at a boundary, so that whoever continues its text starts here."""
        node = holding.tip
        if node.state:
            self.index.touch_state(node)
            return
        slot = self._rolling_slot(request, holding)
        if not slot:
            return
        self._orders.copy(holding.slot, slot)
        self.index.keep_state(request, node, slot)
        self._kept(request, holding, node, rolling)

    def _kept(self, request: Request, holding: Holding, node: Node, rolling: bool) -> None:
        """A rolling state stays when it lies where states are kept anyway; until then it is not told of."""
        if rolling and not self._retention.wants(node.tokens, request.prompt_tokens, 0, holding.junction):
            holding.rolling, node.rolling = node, holding
        else:
            self._tell(node)

    def _tell(self, node: Node) -> None:
        if self.record_published:
            self._published.append(node)

    def _decline(self, reason: str) -> int:
        self.declines[reason] += 1
        return 0


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
