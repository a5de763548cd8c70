"""KDA over whole rows at once: inside a chunk by matrix products, from chunk to chunk by the state.

    tokens of a row   |0 .......... 63|64 ........ 127|128 .. |      the grid starts where the row starts
    one chunk         |0..15|16..31|32..47|48..63|                   sub-chunks bound the exponents

With G the log decay summed from the start of the chunk, for one head and an incoming state S:

    L[i,j] = beta_i <k_i, k_j exp(G_i - G_j)>, j < i        P[i,j] = <q_i, k_j exp(G_i - G_j)>, j <= i
    (I + L) U = beta (v - (k exp G) S^T)                    O = (q exp G) S^T + P U
    S <- S exp(G_C) + U^T (k exp(G_C - G))

Between sub-chunks exp(G_i - G_j) is a product of factors <= 1: from j to the end of its sub-chunk, over whole
sub-chunks, from the start of its own sub-chunk to i. Inside one it is factorised about the middle row.
B is chunks x heads, C tokens of a chunk, n sub-chunks, K and V key and value channels; states are [V, K].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64
SUB = 16
MAX_EXPONENT = 80.0  # 16 steps at the model's bound of -5
BLOCK_ELEMENTS = 1 << 20  # one key tensor of a block of chunks: what is worked on together


class Inputs(NamedTuple):
    """Token rows as the op got them."""

    q: Tensor  # [T, H, K]
    k: Tensor  # [T, H, K]
    v: Tensor  # [T, H, V]
    g: Tensor  # [T, H, K]
    beta: Tensor  # [T, H]


class Block(NamedTuple):
    """Chunks worked on together, ordered by place in the row and then by row."""

    tokens: Tensor  # [M, C] token row of each place; places past the row repeat its first token
    valid: Tensor | None  # [M, C] False past the row; None when nothing is
    steps: list[int]  # how many rows still run, chunk by chunk; they are the first ones


class Local(NamedTuple):
    """What a chunk knows before its state arrives."""

    reads: Tensor  # [B, 2C, K] decayed queries, then (I+L)^-1 of the decayed keys
    corrections: Tensor  # [B, C, V] (I+L)^-1 beta v
    weights: Tensor  # [B, C, C] P
    keys: Tensor  # [B, C, K] keys decayed to the end of the chunk
    decay: Tensor  # [B, K] of the whole chunk


def blocks(begins: list[int], lengths: list[int], size: int, width: int) -> Iterator[Block]:
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
        yield block(begins, lengths, size, first, steps)


def block(begins: list[int], lengths: list[int], size: int, first: int, steps: list[int]) -> Block:
    """The token rows of chunks first .. first + len(steps)."""
    start, left = [], []
    for c, rows in enumerate(steps, first):
        start += [begins[r] + c * size for r in range(rows)]
        left += [lengths[r] - c * size for r in range(rows)]
    place = torch.arange(size)
    begin = torch.tensor(start).unsqueeze(1)
    tokens = begin + place
    if min(left) >= size:
        return Block(tokens, None, steps)
    valid = place < torch.tensor(left).unsqueeze(1)
    return Block(torch.where(valid, tokens, begin), valid, steps)


def gather(x: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """x [T, H, *] -> [M * H, C, *], zero past the rows."""
    size = block.tokens.shape[1]
    picked = x.index_select(0, block.tokens.flatten()).unflatten(0, (-1, size)).to(dtype)
    if block.valid is not None:
        shape = (*block.valid.shape, *[1] * (picked.dim() - 2))
        picked = picked.masked_fill(~block.valid.view(shape), 0.0)
    return picked.transpose(1, 2).flatten(0, 1)


def local(inputs: Inputs, block: Block, dtype: torch.dtype) -> Local:
    """All of a block's chunks, before any state is known."""
    q, k, v, g, beta = (gather(x, block, dtype) for x in inputs)
    return solve(q, k, v, g, beta.unsqueeze(-1))


def solve(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Local:
    """q, k, g [B, C, K], v [B, C, V], beta [B, C, 1] -> Local. C is a multiple of 16."""
    g = g.clamp(min=-104.0 if g.dtype == torch.float32 else -746.0)  # exp is 0 from there on
    g, keys = g.unflatten(1, (-1, SUB)), k.unflatten(1, (-1, SUB))  # [B, n, 16, K]
    both = torch.cat([q.unflatten(1, (-1, SUB)), keys], 2)  # [B, n, 32, K]
    inner = g.cumsum(2)  # from the start of the sub-chunk, the row included
    outer = torch.zeros_like(g)  # after the row, to the end of the sub-chunk
    outer[:, :, :-1] = g[:, :, 1:].flip(2).cumsum(2).flip(2)
    step = inner[:, :, -1].exp()  # [B, n, K]
    rows = both * inner.exp().repeat(1, 1, 2, 1)
    of_queries, of_keys, ends = scores(both, keys, g, inner, rows, keys * outer.exp(), step)
    before = torch.cat([torch.ones_like(step[:, :1]), step[:, :-1]], 1).cumprod(1)
    rows = (rows * before.unsqueeze(2)).unflatten(2, (2, SUB))
    right = torch.cat([rows[:, :, 1].flatten(1, 2), v], 2) * beta
    lower = torch.tril(of_keys, -1) * beta
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    width = k.shape[2]
    reads = torch.cat([rows[:, :, 0].flatten(1, 2), solved[..., :width]], 1)
    return Local(reads, solved[..., width:], torch.tril(of_queries), ends, step.prod(1))


def scores(
    both: Tensor, keys: Tensor, g: Tensor, inner: Tensor, rows: Tensor, ends: Tensor, step: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """<row_i, key_j exp(G_i - G_j)> for queries and keys [B, C, C], and the keys decayed to the chunk's end.

    ``ends`` is advanced in place, sub-chunk by sub-chunk. What lies above the diagonal is not meant.
    """
    batch, subs, _, _width = keys.shape
    result = keys.new_zeros(2, batch, subs * SUB, subs * SUB)
    near = diagonal(both, keys, g, inner).unflatten(2, (2, SUB))
    for i in range(subs):
        part = slice(i * SUB, (i + 1) * SUB)
        result[:, :, part, part] = near[:, i].transpose(0, 1)
        if i > 1:
            ends[:, : i - 1] *= step[:, i - 1, None, None]
        if i:
            far = torch.bmm(rows[:, i], ends[:, :i].flatten(1, 2).mT).unflatten(1, (2, SUB))
            result[:, :, part, : i * SUB] = far.transpose(0, 1)
    ends[:, :-1] *= step[:, -1, None, None]
    return result[0], result[1], ends.flatten(1, 2)


def diagonal(both: Tensor, keys: Tensor, g: Tensor, inner: Tensor) -> Tensor:
    """The sub-chunks against themselves, [B, n, 32, 16]; finite above the diagonal and otherwise undefined there.

    A gate without a lower bound may decay by more than exp(-80) in 16 steps: then G_i - G_j is summed apart
    for every pair, [B, 16, 16, K] at a time, and nothing is factorised.
    """
    if g.numel() == 0 or inner[:, :, -1].min() >= -MAX_EXPONENT:
        up = (inner - inner[:, :, SUB // 2 - 1, None]).exp()
        rows = both * up.repeat(1, 1, 2, 1)
        return torch.matmul(rows, (keys / up).mT)
    later = torch.ones(SUB, SUB, dtype=torch.bool).tril(-1)[..., None]  # [i, j]: i > j
    parts = []
    for i in range(keys.shape[1]):
        pairs = torch.where(later, g[:, i, :, None], 0.0).cumsum(1).exp()  # [B, i, j, K]
        decayed = pairs * keys[:, i, None]
        parts.append(
            torch.einsum("bhik,bijk->bhij", both[:, i].unflatten(1, (2, SUB)), decayed).flatten(1, 2)
        )
    return torch.stack(parts, 1)


def sweep(local: Local, steps: list[int], heads: int, state: Tensor) -> tuple[Tensor, Tensor]:
    """Carry ``state`` [R * H, V, K] through the block in place -> o and corrections U, both [B, C, V]."""
    out, used = torch.empty_like(local.corrections), torch.empty_like(local.corrections)
    size, begin = out.shape[1], 0
    for rows in steps:
        here, end = state[: rows * heads], begin + rows * heads
        seen = torch.bmm(local.reads[begin:end], here.mT)  # [B, 2C, V]
        u = local.corrections[begin:end] - seen[:, size:]
        torch.baddbmm(seen[:, :size], local.weights[begin:end], u, out=out[begin:end])
        here.mul_(local.decay[begin:end, None])
        here.baddbmm_(u.mT, local.keys[begin:end])
        used[begin:end] = u
        begin = end
    return out, used
