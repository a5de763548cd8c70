"""Sort token rows by expert in Triton, alike on every run, and cut each expert's rows into blocks.

    ids [T, k] --128 at a time--> how many came before, of the same expert, in their part
               --down the parts-> how many in the parts before
               --all experts----> where each expert's rows and blocks start
               -----------------> place of every choice, choice at every place

    blocks    [e0 e0 e0 .][e0 . . .][e2 e2 . .] ..  [holes]     of one expert each, the last of it partly full

No atomics: a place depends on the ids alone, and choices of one expert keep their order. T token rows,
k chosen experts a token, E experts, N = T*k choices.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .jit_triton import blocks, jit, launch, power_of_two, tl

PART = 128  # choices compared with each other at once
DOWN = {"BP": 64, "BE": 16}  # parts and experts that are summed at once
OWNED = 8  # blocks that look for their expert at once
UNUSED, HOLES = -1, -2  # instead of an expert: a block without rows, one of choices that are not here


class Sorted(NamedTuple):
    """Where the choices went. Rows of block b are the places first[b] .. end[b] - 1, all of expert[b]."""

    order: Tensor  # [N] int32, the choice t * k + j at each place
    idx: Tensor  # [T, k] int32, the place of each choice, -1 where it is not here
    expert: Tensor  # [B] int32, or UNUSED, or HOLES
    first: Tensor  # [B] int32
    end: Tensor  # [B] int32


@jit
def expert_at(ids, choice, N, E, ids_row, TOP_K: tl.constexpr):
    """The expert of choices, E for one that is not here; past the last choice nothing is read."""
    at = ids + (choice // TOP_K).to(tl.int64) * ids_row + choice % TOP_K
    found = tl.load(at, mask=choice < N, other=-1).to(tl.int32)
    return tl.where((found < 0) | (found >= E), E, found)


@jit
def before_kernel(
    ids, rank, counts, N, E, ids_row, TOP_K: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    one = tl.arange(0, PART)
    mine = tl.program_id(0) * PART + one
    live = mine < N
    expert = expert_at(ids, mine, N, E, ids_row, TOP_K)
    same = (expert[:, None] == expert[None, :]) & live[None, :]
    earlier = tl.sum((same & (one[None, :] < one[:, None])).to(tl.int32), 1)
    of_it = tl.sum(same.to(tl.int32), 1)
    tl.store(rank + mine, earlier, mask=live)
    tl.store(
        counts + tl.program_id(0).to(tl.int64) * (E + 1) + expert, of_it, mask=live & (earlier == of_it - 1)
    )


@jit
def ahead_kernel(counts, totals, P, E, BP: tl.constexpr, BE: tl.constexpr):
    """Each part's count of an expert becomes the sum of the parts before it; the sum of all is its total."""
    expert, row = tl.program_id(0) * BE + tl.arange(0, BE), tl.arange(0, BP)
    known = expert <= E
    total = tl.zeros((BE,), tl.int32)
    for first in range(0, P, BP):
        at = counts + (first + row).to(tl.int64)[:, None] * (E + 1) + expert[None, :]
        live = (first + row < P)[:, None] & known[None, :]
        own = tl.load(at, mask=live, other=0)
        tl.store(at, tl.cumsum(own, 0) - own + total[None, :], mask=live)
        total += tl.sum(own, 0)
    tl.store(totals + expert, total, mask=known)


@jit
def blocks_kernel(
    totals, starts, expert, first, end, E, B,
    BLOCK: tl.constexpr, BE: tl.constexpr, OWNED: tl.constexpr,
):  # fmt: skip
    """Where the rows of each expert start, E being the holes; the expert and the rows of some blocks."""
    every = tl.arange(0, BE)
    total = tl.load(totals + every, mask=every <= E, other=0)
    start = tl.cumsum(total, 0) - total
    if tl.program_id(0) == 0:
        tl.store(starts + every, start, mask=every <= E)
    needed = (total + BLOCK - 1) // BLOCK
    after = tl.cumsum(needed, 0)
    mine = tl.program_id(0) * OWNED + tl.arange(0, OWNED)
    own = (after[None, :] > mine[:, None]) & ((after - needed)[None, :] <= mine[:, None])
    who = tl.sum(tl.where(own, every[None, :] + 1, 0), 1) - 1
    begin = start[None, :] + (mine[:, None] - (after - needed)[None, :]) * BLOCK
    row = tl.sum(tl.where(own, begin, 0), 1)
    stop = tl.sum(tl.where(own, (start + total)[None, :], 0), 1)
    tl.store(expert + mine, tl.where(who == E, -2, who), mask=mine < B)
    tl.store(first + mine, row, mask=mine < B)
    tl.store(end + mine, tl.minimum(stop, row + BLOCK), mask=mine < B)


@jit
def place_kernel(
    ids, rank, counts, starts, order, idx, N, E, ids_row, TOP_K: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    mine = part.to(tl.int32) * PART + tl.arange(0, PART)
    live = mine < N
    expert = expert_at(ids, mine, N, E, ids_row, TOP_K)
    place = tl.load(starts + expert, mask=live, other=0)
    place += tl.load(counts + part * (E + 1) + expert, mask=live, other=0)
    place += tl.load(rank + mine, mask=live, other=0)
    tl.store(order + place, mine, mask=live)
    tl.store(idx + mine, tl.where(expert == E, -1, place), mask=live)


def most_blocks(choices: int, experts: int, block: int) -> int:
    """Blocks that so many choices can fill, the holes' included; known without looking at them."""
    return min(choices, choices // block + experts + 1)


def sorted_by_expert(ids: Tensor, num_experts: int, block: int) -> Sorted:
    """ids [T, k], those of a token side by side; an id that is no expert is not here. Waits for nothing."""
    (tokens, top_k), device = ids.shape, ids.device
    choices, parts = tokens * top_k, blocks(tokens * top_k, PART)
    whole = {"dtype": torch.int32, "device": device}
    rank, order, idx = (torch.empty(choices, **whole) for _ in range(3))
    counts = torch.zeros(parts, num_experts + 1, **whole)
    totals, starts = torch.empty(num_experts + 1, **whole), torch.empty(num_experts + 1, **whole)
    number = most_blocks(choices, num_experts, block)
    expert, first, end = (torch.empty(number, **whole) for _ in range(3))
    sizes = choices, num_experts, ids.stride(0)
    split = {"TOP_K": top_k, "PART": PART}
    launch(before_kernel, (parts,), ids, rank, counts, *sizes, **split)
    grid = (blocks(num_experts + 1, DOWN["BE"]) if choices else 0,)
    launch(ahead_kernel, grid, counts, totals, parts, num_experts, **DOWN)
    wide = {"BLOCK": block, "BE": power_of_two(num_experts + 1), "OWNED": OWNED}
    args = (totals, starts, expert, first, end, num_experts, number)
    launch(blocks_kernel, (blocks(number, OWNED),), *args, **wide, num_warps=8)
    launch(place_kernel, (parts,), ids, rank, counts, starts, order, idx, *sizes, **split)
    return Sorted(order, idx.view(tokens, top_k), expert, first, end)
