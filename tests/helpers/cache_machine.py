"""Random traffic over the cache's books, with a shadow of what each page and slot would hold.

    shadow    page -> what each of its tokens was written by     slot -> the history its state has summed up

A history is a number that stands for a salt and all tokens so far. Before a forward runs, everything that it
will read must be the history of the request that reads it: a block published early, a state under the key of
another count, an eviction of something in use all show as the wrong number at the place where it is used.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from k3compile.runtime.cache.cache import NO_HIT, Cache
from k3compile.runtime.cache.checkpoints import Grid, plan_chunk
from k3compile.runtime.cache.orders import Clear, Copy
from k3compile.runtime.request import Request

NOTHING, EMPTY = "poison", 0  # of freed numbers; of a cleared state


class Geometry(NamedTuple):
    """Sizes of a machine: few of everything."""

    pages: int = 48
    requests: int = 3
    checkpoints: int = 4
    page_size: int = 2
    unit: int = 4
    block: int = 8
    alignment: int = 1
    exports: bool = True
    retention: int | None = None
    drafts: int = 3
    poison: bool = True


class Row(NamedTuple):
    request: Request
    count: int
    drafts: tuple[int, ...]
    checkpoint: int
    checkpoint_slot: int


class Machine:
    """Plays scheduler and engine over one cache; every method leaves clean books or raises AssertionError."""

    def __init__(self, seed: int, geometry: Geometry = Geometry()) -> None:
        g = self.g = geometry
        self.rng = random.Random(seed)
        self.grid = Grid(g.block, g.unit, g.alignment)
        self.cache = Cache(
            g.pages,
            1 + g.requests,
            g.page_size,
            poison=g.poison,
            grid=self.grid,
            num_checkpoints=g.checkpoints,
            retention_interval=g.retention,
        )
        self.cache.index.record = True
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.pinned = []
        self.page = {p: [NOTHING] * g.page_size for p in range(g.pages)}
        self.slot = dict.fromkeys(range(self.cache.total_slots), NOTHING)
        self.names: dict[bytes, list[int]] = {}  # key -> histories of its tokens
        self.histories: dict[Request, list[int]] = {}
        self.made = 0
        self.seen_events: set[str] = set()

    def run(self, operations: int) -> None:
        """So many random operations, then the end of everything."""
        kinds = {self.arrive: 3, self.step: 12, self.abort: 1, self.preempt: 1, self.pin: 1, self.load: 1}
        for _ in range(operations):
            self.rng.choices(list(kinds), list(kinds.values()))[0]()
            self.check()
        self.finish()

    def finish(self) -> None:
        """Everybody leaves; every count must be zero then."""
        for request in [*self.running, *self.waiting]:
            self.leave(request)
        self.check()
        for node, _ in self.pinned:
            self.cache.index.unpin(node)
        self.pinned = []
        self.check()
        self.cache.drop()
        self.cache.check()
        lists = (self.cache.pages, self.cache.slots, self.cache.checkpoints)
        assert [n.used for n in lists] == [0, 0, 0], "something leaked"
        assert len(self.cache.index) == 0

    def check(self) -> None:
        """The books are clean, and every published page and state holds what its key says."""
        self.cache.check()
        for node in self.cache.index:
            told = self.names[node.key]
            assert len(told) == node.tokens, f"{node} has the key of {len(told)} tokens"
            found = [h for p in node.pages for h in self.page[p]]
            assert found == told[-self.g.unit :], f"{node} holds other latents"
            if node.state:
                assert self.slot[node.state] == told[-1], f"{node} holds another state"
        for node, state in self.pinned:
            assert self.cache.index.get(node.key) is node, f"{node} was evicted while it was copied"
            assert state in (0, node.state), f"the state of {node} moved while it was copied"

    def arrive(self) -> None:
        """A request that continues or repeats one of a few texts."""
        if len(self.waiting) > 4:
            return
        rng, limit = self.rng, (self.g.pages - 1) * self.g.page_size - 8
        text = random.Random(rng.randint(0, 2)).choices([1, 2, 3], k=40)
        if self.running and rng.random() < 0.4:
            text = list(rng.choice(self.running).tokens)  # the next turn
        tokens = text[: rng.randint(1, len(text))] + rng.choices([1, 2], k=rng.choice([0, 1, 5]))
        salt = rng.choice(["", "", "b"])
        for _ in range(rng.choice([1, 1, 2])):  # the same twice at once
            request = Request(f"r{self.made}", tokens[:limit], cache_salt=salt)
            self.made += 1
            self.waiting.append(request)
            self.history(request, len(request.tokens))

    def abort(self) -> None:
        """Somebody goes, wherever it is."""
        if self.running or self.waiting:
            self.leave(self.rng.choice([*self.running, *self.waiting]))
            self.write()

    def preempt(self) -> None:
        """Somebody has to start over."""
        if self.running:
            self.yield_(self.rng.choice(self.running))

    def pin(self) -> None:
        """A transfer begins or ends."""
        if self.pinned and self.rng.random() < 0.6:
            self.cache.index.unpin(self.pinned.pop()[0])
        elif len(self.cache.index):
            node = self.rng.choice(list(self.cache.index))
            self.cache.index.pin(node)
            self.pinned.append((node, node.state))

    def load(self) -> None:
        """The first of the queue gets more of its prefix from a tier than the index has, or not."""
        if not self.waiting or len(self.running) == self.g.requests:
            return
        request, unit = self.waiting[0], self.g.unit
        hit = self.cache.match(request)
        end = (len(request.tokens) - 1) // unit * unit
        request.seen = hit.tokens
        if end <= hit.tokens or not self.cache.admit(request, hit, end - hit.tokens):
            request.seen = 0
            return
        self.waiting.remove(request)
        self.running.append(request)
        self.write()
        if self.rng.random() < 0.7:
            self.fill(request, hit.tokens, end)
            self.slot[self.cache.holding(request).slot] = self.history(request, end)
            request.seen = end
            self.cache.advance(request, loaded=True)
            self.write()
            self.note("loaded")

    def step(self) -> None:
        """Plan, run, judge, commit, as the engine does."""
        rows = self.plan()
        self.write()
        if self.forward(rows):
            kept = [self.judge(row) for row in rows]
            for row, tokens in zip(rows, kept):
                self.commit(row, tokens)
        else:  # the step failed: its requests end, and nothing of it is kept
            for row in rows:
                self.leave(row.request)
        self.write()
        assert not self.cache.states.pending, "a state is waited for after its step"
        for node in self.cache.take_published():
            assert self.cache.index.get(node.key) is node

    def plan(self) -> list[Row]:
        rng, rows = self.rng, []
        while len(rows) < len(self.running):
            request = self.running[len(rows)]
            unseen = request.unseen
            drafts = tuple(rng.choices([1, 2], k=rng.randint(0, self.g.drafts))) if unseen == 1 else ()
            count, checkpoint = self.chunk(request, self.cache.holding(request).junction)
            if self.cache.grow(request, count + len(drafts)) is None:
                self.yield_(self.running[-1])
                self.note("preempted")
                continue
            rows.append(self.row(request, count + len(drafts), drafts, checkpoint))
        for request in list(self.waiting):
            if len(self.running) == self.g.requests:
                break
            hit = self.cache.match(request) if rng.random() < 0.95 else NO_HIT
            assert hit.tokens < len(request.tokens), "a hit leaves no token to run"
            if self.cache.deferred(request, hit):
                self.note("deferred")
                continue
            request.seen = hit.tokens
            count, checkpoint = self.chunk(request, hit.junction)
            if not self.cache.admit(request, hit, count, reserve=len(self.running)):
                request.seen = 0
                self.note("refused")
                break
            self.note("hit" if hit.tokens else "cold")
            self.note("junction" if hit.junction else "none")
            self.waiting.remove(request)
            self.running.append(request)
            rows.append(self.row(request, count, (), checkpoint))
        return rows

    def chunk(self, request: Request, junction: int) -> tuple[int, int]:
        granted = min(request.unseen, self.rng.choice([1, 3, 8, 100]))
        return plan_chunk(self.grid, request.seen, granted, len(request.tokens), self.g.exports, junction)

    def row(self, request: Request, count: int, drafts: tuple[int, ...], checkpoint: int) -> Row:
        slot = self.cache.checkpoint(request, checkpoint) if checkpoint else 0
        return Row(request, count, drafts, checkpoint if slot else 0, slot)

    def forward(self, rows: list[Row]) -> bool:
        """Read everything, then write everything; False when the step fails half-way."""
        for request, *_ in rows:
            holding = self.cache.holding(request)
            assert self.slot[holding.slot] == self.history(request, request.seen), f"state of {request!r}"
            for at in range(request.seen):
                page, place = divmod(at, self.g.page_size)
                found = self.page[holding.pages[page]][place]
                assert found == self.history(request, at + 1), f"{request!r} reads a wrong latent at {at}"
        fails = self.rng.random() < 0.02
        for request, count, drafts, checkpoint, slot in rows[: len(rows) // 2 if fails else None]:
            seen, holding = request.seen, self.cache.holding(request)
            self.fill(request, seen, seen + count, drafts)
            if not drafts:
                self.slot[holding.slot] = self.history(request, seen + count)
            if checkpoint:
                assert self.g.exports or checkpoint == seen + count
                self.slot[slot] = self.history(request, checkpoint)
        return not fails

    def judge(self, row: Row) -> list[int]:
        """The tokens a row's request keeps; a verified row's states are settled."""
        request, count, drafts, *_ = row
        if request.seen + count < len(request.tokens):
            return []
        accepted = self.rng.randint(0, len(drafts))
        tokens = [*drafts[:accepted], self.rng.choice([1, 2])]
        tokens = tokens[: self.rng.choice([1, 2, 99])]  # a stop among them
        if drafts:
            end, unit = request.seen + len(tokens), self.g.unit
            boundary = end // unit * unit
            told = self.history(request, len(request.tokens), tokens)
            if boundary > request.seen:
                slot = self.cache.checkpoint(request, boundary)
                assert slot == 0 or self.cache.checkpoint(request, boundary) == slot, "another answer"
                if slot:
                    self.slot[slot] = told[boundary - 1]
                    self.note("boundary")
            self.slot[self.cache.holding(request).slot] = told[end - 1]
        return tokens

    def commit(self, row: Row, tokens: list[int]) -> None:
        request = row.request
        request.seen += len(tokens) if row.drafts else row.count
        request.tokens.extend(tokens)
        self.history(request, len(request.tokens))
        self.cache.advance(request)
        limit = (self.g.pages - 1) * self.g.page_size - self.g.drafts - 1
        if len(request.tokens) >= limit or (tokens and self.rng.random() < 0.08):
            self.leave(request)

    def history(self, request: Request, count: int, more: list[int] | None = None):
        """The history after ``count`` tokens; with ``more``: the list for all tokens and those after them."""
        told = self.histories.setdefault(request, [])
        while len(told) < len(request.tokens):
            told.append(hash((told[-1] if told else EMPTY, request.tokens[len(told)], request.cache_salt)))
            if len(told) % self.g.unit == 0:
                self.names[self.cache.chain(request).key(len(told) // self.g.unit)] = list(told)
        if more is None:
            return told[count - 1] if count else EMPTY
        longer = list(told)
        for token in more:
            longer.append(hash((longer[-1], token, request.cache_salt)))
        return longer

    def fill(self, request: Request, start: int, end: int, drafts: tuple[int, ...] = ()) -> None:
        """Write the latents of tokens [start, end), the last of which may be drafts."""
        told = self.history(request, 0, list(drafts))
        for at in range(start, end):
            page, place = divmod(at, self.g.page_size)
            number = self.cache.holding(request).pages[page]
            assert self.cache.pages.owner(number) is request, f"{request!r} writes into a page of others"
            self.page[number][place] = told[at]

    def write(self) -> None:
        """Carry out the orders on the shadow."""
        for order in self.cache.take_writes():
            if isinstance(order, Copy):
                values = [self.slot[s] for s in order.sources]
                self.slot.update(zip(order.targets, values))
            elif isinstance(order, Clear):
                self.slot.update(dict.fromkeys(order.slots, EMPTY))
            else:
                self.slot.update(dict.fromkeys(order.slots, NOTHING))
                self.page.update({p: [NOTHING] * self.g.page_size for p in order.pages})

    def leave(self, request: Request) -> None:
        (self.running if request in self.running else self.waiting).remove(request)
        request.finish = "abort"
        self.cache.release(request)

    def yield_(self, request: Request) -> None:
        self.running.remove(request)
        self.cache.release(request)
        request.seen = 0
        self.waiting.insert(0, request)

    def note(self, event: str) -> None:
        self.seen_events.add(event)
