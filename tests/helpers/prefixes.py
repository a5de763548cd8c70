"""Requests that run over the cache's books without a model: plan a chunk, commit it, ask again."""

from __future__ import annotations

from k3compile.runtime.cache.cache import Cache
from k3compile.runtime.cache.checkpoints import Grid, plan_chunk
from k3compile.runtime.request import Request

B, UNIT, PAGE = 8, 4, 2


def make(pages=200, requests=4, checkpoints=40, block=B, unit=UNIT, page=PAGE, **more) -> Cache:
    grid = Grid(block, unit, alignment=1)
    return Cache(pages, 1 + requests, page, grid=grid, num_checkpoints=checkpoints, **more)


def ask(tokens, salt="") -> Request:
    return Request("r", list(tokens), cache_salt=salt)


def begin(cache: Cache, request: Request, budget=1000, exports=True) -> int:
    """Admit a request and plan its first chunk; its length."""
    hit = cache.match(request)
    request.seen = hit.tokens
    granted = min(budget, request.unseen)
    chunk = plan_chunk(cache.grid, request.seen, granted, len(request.tokens), exports, hit.junction)
    assert cache.admit(request, hit, chunk.count)
    if chunk.checkpoint:
        cache.checkpoint(request, chunk.checkpoint)
    return chunk.count


def go_on(cache: Cache, request: Request, budget=1000, exports=True) -> int:
    """Plan the next chunk of an admitted request; its length."""
    junction = cache.holding(request).junction
    granted = min(budget, request.unseen)
    chunk = plan_chunk(cache.grid, request.seen, granted, len(request.tokens), exports, junction)
    assert cache.grow(request, chunk.count)
    if chunk.checkpoint:
        cache.checkpoint(request, chunk.checkpoint)
    return chunk.count


def commit(cache: Cache, request: Request, count: int, token: int = 1) -> None:
    request.seen += count
    if request.seen == len(request.tokens):
        request.tokens.append(token)
    cache.advance(request)
    cache.check()


def serve(cache: Cache, tokens, answer=1, budget=1000, exports=True, salt="") -> tuple[int, int, Request]:
    """Run a prompt and generate ``answer`` tokens: tokens found, chunks that the prompt took, the request."""
    request = ask(tokens, salt)
    count, chunks = begin(cache, request, budget, exports), 1
    found = request.seen
    commit(cache, request, count)
    while request.unseen > 1:
        commit(cache, request, go_on(cache, request, budget, exports))
        chunks += 1
    while len(request.tokens) < len(tokens) + answer:
        commit(cache, request, go_on(cache, request))
    cache.release(request)
    cache.check()
    return found, chunks, request


def text(n: int, start: int = 10) -> list[int]:
    return list(range(start, start + n))


def verify(cache: Cache, request: Request, kept: list[int], drafts: int = 7) -> int:
    """A row of ``drafts`` drafts of which ``kept`` tokens stay; the slot for the state at its boundary."""
    assert cache.grow(request, 1 + drafts)
    boundary = (request.seen + len(kept)) // UNIT * UNIT
    slot = cache.checkpoint(request, boundary) if boundary > request.seen else 0
    request.seen += len(kept)
    request.tokens.extend(kept)
    cache.advance(request)
    cache.check()
    return slot
