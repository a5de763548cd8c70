"""KDA over whole rows at once: inside a chunk by matrix products, from chunk to chunk by the state.

    tokens of a row   |0 .......... 63|64 ........ 127|128 .. |      the grid starts where the row starts
    one chunk         |0..15|16..31|32..47|48..63|                   sub-chunks bound the exponents

With G the log decay summed from the start of the chunk, for one head and an incoming state S:

    L[i,j] = beta_i <k_i, k_j exp(G_i - G_j)>, j < i        P[i,j] = <q_i, k_j exp(G_i - G_j)>, j <= i
    (I + L) U = beta (v - (k exp G) S^T)                    O = (q exp G) S^T + P U
    S <- S exp(G_C) + U^T (k exp(G_C - G))

Between sub-chunks exp(G_i - G_j) is a product of factors <= 1: from j to the end of its sub-chunk, over whole
sub-chunks, from the start of its own sub-chunk to i. Inside one it is factorised about the middle row, which
needs no more than exp(+-80) while 16 steps decay by less than exp(-80).
B is chunks x heads, C tokens of a chunk, n sub-chunks, K and V key and value channels; states are [V, K].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64
SUB = 16
MAX_EXPONENT = 80.0  # 16 steps at the model's bound of -5
IN_PLACE_ELEMENTS = 1 << 14  # from this size of a state on, a copy costs more than separate calls
BLOCK_ELEMENTS = 1 << 17  # one key tensor of what is worked on together: it should stay in cache
FLOOR = {torch.float32: -104.0, torch.float64: -746.0}  # exp is 0 from there on
BeforeChunk = Callable[[list[Tensor]], None]  # given the states of the rows, see borrow


class Inputs(NamedTuple):
    """Token rows as the op got them."""

    q: Tensor  # [T, H, K]
    k: Tensor  # [T, H, K]
    v: Tensor  # [T, H, V]
    g: Tensor  # [T, H, K]
    beta: Tensor  # [T, H]


class Block(NamedTuple):
    """Chunks worked on together, ordered by place in the row and then by row."""

    tokens: Tensor  # [M, C] token row of each place; places past the row repeat the chunk's first token
    invalid: Tensor | None  # [M, C] True past the row; None when nothing is
    steps: list[int]  # how many rows still run, chunk by chunk; they are the first ones


class Local(NamedTuple):
    """What a chunk knows before its state arrives."""

    reads: Tensor  # [B, 2C, K] decayed queries, then (I+L)^-1 of the decayed keys times beta
    corrections: Tensor  # [B, C, V] (I+L)^-1 beta v
    weights: Tensor  # [B, C, C] P
    keys: Tensor  # [B, C, K] keys decayed to the end of the chunk
    decay: Tensor  # [B, K] of the whole chunk


def blocks(begins: list[int], lengths: list[int], size: int, width: int, like: Tensor) -> Iterator[Block]:
    """Cut rows, longest first, into blocks of chunks of ``size`` tokens; ``width`` is H * K."""
    counts = [-(-n // size) for n in lengths]
    most = max(1, BLOCK_ELEMENTS // (size * width))
    at = 0
    while at < counts[0]:
        first, used, steps = at, 0, []
        while at < counts[0]:
            rows = sum(1 for c in counts if c > at)
            if steps and used + rows > most:
                break
            steps.append(rows)
            used, at = used + rows, at + 1
        yield block(begins, lengths, size, first, steps, like.device)


def block(
    begins: list[int], lengths: list[int], size: int, first: int, steps: list[int], device: torch.device
) -> Block:
    """The token rows of chunks first .. first + len(steps)."""
    start, left = [], []
    for c, rows in enumerate(steps, first):
        start += [begins[r] + c * size for r in range(rows)]
        left += [lengths[r] - c * size for r in range(rows)]
    place = torch.arange(size, device=device)
    begin = torch.tensor(start, device=device).unsqueeze(1)
    tokens = begin + place
    if min(left) >= size:
        return Block(tokens, None, steps)
    invalid = place >= torch.tensor(left, device=device).unsqueeze(1)
    return Block(torch.where(invalid, begin, tokens), invalid, steps)


def gather(x: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """x [T, H, *] -> a view [M, H, n, 16, *] of the block's rows, zero past the rows."""
    count, size = block.tokens.shape
    picked = x.index_select(0, block.tokens.view(-1)).to(dtype)
    if block.invalid is not None:
        picked.masked_fill_(block.invalid.view(-1, *[1] * (x.dim() - 1)), 0.0)
    return picked.view(count, size // SUB, SUB, *x.shape[1:]).movedim(3, 1)


def local(inputs: Inputs, block: Block, dtype: torch.dtype) -> Local:
    """All of a block's chunks, before any state is known."""
    q, k, v, g, beta = (gather(x, block, dtype) for x in inputs)
    count, heads, subs, _, width = k.shape
    both = k.new_empty(count, heads, subs, 2, SUB, width)
    both[:, :, :, 0] = q
    both[:, :, :, 1] = k
    g = torch.clamp(g, min=FLOOR[dtype], out=torch.empty(k.shape, dtype=dtype, device=k.device))
    batch, size = count * heads, subs * SUB
    v, beta = v.reshape(batch, size, v.shape[4]), beta.reshape(batch, size, 1)
    return solve(both.view(batch, subs, 2, SUB, width), v, g.view(batch, subs, SUB, width), beta)


def solve(both: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Local:
    """both [B, n, 2, 16, K] (queries, keys), v [B, C, V], g [B, n, 16, K], beta [B, C, 1] -> Local."""
    batch, subs, _, width = g.shape
    size = subs * SUB
    decays = torch.matmul(partial_sums(g), g)  # [B, n, 48, K]
    steep = (decays[:, :, SUB - 1] < -MAX_EXPONENT).flatten(1).any(1).nonzero().flatten()
    decays.exp_()
    inner, outer, middle = decays[:, :, :SUB], decays[:, :, SUB : 2 * SUB], decays[:, :, 2 * SUB :]
    step = inner[:, :, -1]  # [B, n, K]
    rows, ends = both * inner.unsqueeze(2), both[:, :, 1] * outer
    near = diagonal(both, middle)
    if len(steep):  # these alone: the bits of a chunk must not depend on its neighbours
        near[steep] = diagonal_steep(both[steep], g[steep])
    of_both = scores(rows.view(batch, subs, 2 * SUB, width), ends, step, near)  # [B, 2, C, C]
    if subs > 1:
        rows[:, 1:] *= step[:, :-1].cumprod(1)[:, :, None, None]
    right = v.new_empty(batch, size, width + v.shape[2])
    right[..., :width] = rows[:, :, 1].reshape(batch, size, width)
    right[..., width:] = v
    solved = forward_substitution(of_both[:, 1].mul_(beta), right.mul_(beta))
    reads = v.new_empty(batch, 2 * size, width)
    reads[:, :size] = rows[:, :, 0].reshape(batch, size, width)
    reads[:, size:] = solved[..., :width]
    return Local(reads, solved[..., width:], of_both[:, 0], ends.view(batch, size, width), step.prod(1))


def partial_sums(like: Tensor) -> Tensor:
    """[48, 16], which sums 16 log decays up to a row, after a row, and from the middle row to a row."""
    up_to = torch.ones(SUB, SUB, dtype=like.dtype, device=like.device).tril()
    return torch.cat([up_to, 1 - up_to, up_to - up_to[SUB // 2 - 1]])


def scores(rows: Tensor, ends: Tensor, step: Tensor, near: Tensor) -> Tensor:
    """<row_i, key_j exp(G_i - G_j)> of queries and keys, zero where no key may be seen: [B, 2, C, C].

    ``ends`` [B, n, 16, K], keys decayed to the end of their sub-chunk, is carried to the end of the chunk.
    """
    batch, subs = step.shape[:2]
    result = rows.new_zeros(batch, 2, subs * SUB, subs * SUB)
    for i in range(subs):
        part = slice(i * SUB, (i + 1) * SUB)
        result[:, :, part, part] = near[:, i]
        if i > 1:
            ends[:, : i - 1] *= step[:, i - 1, None, None]
        if i:
            far = torch.bmm(rows[:, i], ends[:, :i].flatten(1, 2).mT)
            result[:, :, part, : i * SUB] = far.view(batch, 2, SUB, i * SUB)
    if subs > 1:
        ends[:, :-1] *= step[:, -1, None, None]
    return result


def hidden(like: Tensor) -> Tensor:
    """[2, 16, 16]: a query does not see later keys, a key neither those nor itself."""
    after = torch.ones(SUB, SUB, dtype=torch.bool, device=like.device).triu(1)
    return torch.stack([after, after | after.new_ones(SUB).diag()])


def diagonal(both: Tensor, middle: Tensor) -> Tensor:
    """The sub-chunks against themselves, [B, n, 2, 16, 16], by factors about the middle row."""
    rows = (both * middle.unsqueeze(2)).flatten(2, 3)
    product = torch.matmul(rows, (both[:, :, 1] / middle).mT)
    return product.view(*both.shape[:4], SUB).masked_fill_(hidden(both), 0.0)


def diagonal_steep(both: Tensor, g: Tensor) -> Tensor:
    """The same for a gate without a bound: G_i - G_j is summed for every pair, nothing is factorised."""
    later = torch.ones(SUB, SUB, dtype=torch.bool, device=g.device).tril(-1)[..., None]  # [i, j]: i > j
    parts = []
    for i in range(g.shape[1]):  # one sub-chunk at a time: [B, 16, 16, K] is large
        pairs = torch.where(later, g[:, i, :, None], 0.0).cumsum(1).exp() * both[:, i, 1, None]
        parts.append(torch.einsum("bxik,bijk->bxij", both[:, i], pairs))
    return torch.stack(parts, 1).masked_fill_(hidden(both), 0.0)


def forward_substitution(lower: Tensor, right: Tensor) -> Tensor:
    """(I + lower)^-1 right for strictly lower [B, C, C] and right [B, C, N], by sub-chunks."""
    size = lower.shape[1]
    subs = size // SUB
    grid = lower.view(-1, subs, SUB, subs, SUB)
    corner = grid.diagonal(dim1=1, dim2=3).movedim(-1, 1)  # [B, n, 16, 16]
    unit = torch.eye(SUB, dtype=lower.dtype, device=lower.device).expand_as(corner)
    inverse = torch.linalg.solve_triangular(corner, unit, upper=False, unitriangular=True)
    out = torch.empty_like(right)
    for i in range(subs):
        part, done = slice(i * SUB, (i + 1) * SUB), slice(0, i * SUB)
        rest = right[:, part]
        if i:
            rest = torch.baddbmm(rest, lower[:, part, done], out[:, done], alpha=-1)
        torch.bmm(inverse[:, i], rest, out=out[:, part])
    return out


def sweep(
    local: Local,
    steps: list[int],
    heads: int,
    states: list[Tensor],
    watch: BeforeChunk | None = None,
) -> Tensor:
    """Carry the states of the rows through the block in place -> o [B, C, V]; ``watch`` sees them before."""
    out = torch.empty_like(local.corrections)
    begin = 0
    for rows in steps:
        if watch is not None:
            watch(states)
        part = slice(begin, begin + rows * heads)
        here = states[:rows] if len(states) > 1 else [states[0][: rows * heads]]
        o, u = apply(Local(*(x[part] for x in local)), here)
        out[part] = o
        advance(here, local.decay[part], u, local.keys[part])
        begin = part.stop
    return out


def apply(local: Local, states: list[Tensor]) -> tuple[Tensor, Tensor]:
    """One chunk of every row, its state read: o and the corrections U, both [B, C, V]."""
    size = local.corrections.shape[1]
    seen = read(states, local.reads)  # [B, 2C, V]
    u = local.corrections - seen[:, size:]
    return torch.baddbmm(seen[:, :size], local.weights, u), u


def scatter(o: Tensor, block: Block, out: Tensor, start: int) -> None:
    """o [M * H, C, V] to the token rows of the block."""
    count, heads, width = len(block.tokens), out.shape[1], out.shape[2]
    rows = o.view(count, heads, -1, width).transpose(1, 2).to(out.dtype).flatten(0, 1)  # [M * C, H, V]
    tokens = block.tokens.flatten()
    if block.invalid is not None:
        keep = (~block.invalid).flatten().nonzero().flatten()
        rows, tokens = rows.index_select(0, keep), tokens.index_select(0, keep)
    out.index_copy_(0, tokens + start, rows)


def borrow(state: Tensor, slots: list[int]) -> list[Tensor]:
    """States of ``slots``: large ones as views [H, V, K] each, small ones as one copy [R * H, V, K]."""
    if len(slots) == 1 or state[0].numel() >= IN_PLACE_ELEMENTS:
        return [state[slot] for slot in slots]
    return [state.index_select(0, torch.tensor(slots, device=state.device)).flatten(0, 1)]


def give_back(state: Tensor, slots: list[int], states: list[Tensor]) -> None:
    """Write what ``borrow`` copied; views have been changed where they are."""
    if len(states) < len(slots):
        index = torch.tensor(slots, device=state.device)
        state.index_copy_(0, index, states[0].view(len(slots), *state.shape[1:]))


def read(states: list[Tensor], keys: Tensor) -> Tensor:
    """keys [B, N, K] against the states -> [B, N, V]."""
    if len(states) == 1:
        return torch.bmm(keys, states[0].mT)
    out = keys.new_empty(*keys.shape[:2], states[0].shape[1])
    split = len(states[0])
    for i, s in enumerate(states):
        part = slice(i * split, (i + 1) * split)
        torch.bmm(keys[part], s.mT, out=out[part])
    return out


def advance(states: list[Tensor], decay: Tensor, u: Tensor, keys: Tensor) -> None:
    """S <- S decay + u^T keys, in place; decay [B, K], u [B, N, V], keys [B, N, K]."""
    split = len(states[0])
    for i, s in enumerate(states):
        part = slice(i * split, (i + 1) * split)
        s.mul_(decay[part].unsqueeze(1))
        if u.shape[1] == 1:
            s.addcmul_(u[part].mT, keys[part])
        else:
            s.baddbmm_(u[part].mT, keys[part])
