"""Where the state of a prefix is kept, and what a prefill chunk must leave there.

    tokens   0 ....... B ....... 2B ....... 3B ....... P . total   B block, P last multiple of the unit h
    older    [-------------------- chunk ------------][--]         stops at P: a pass for the rest
    ours     [-------------------- chunk ------------^---]         one pass, the state at P is written in it

A state serves exactly the prefix that ends at its token count, so that count is decided here and nowhere
else: the scheduler, the cache and the step builder all get it from :func:`plan_chunk`. Plain integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Grid:
    """Token counts at which prefixes may end. Raises ValueError for counts that do not fit each other.

    block: states are kept on its multiples. unit: hashes and hits lie on its multiples; it divides the block.
    alignment: a state written inside a chunk lies so many tokens (or a multiple) after the chunk's start.
    table: states lie in a table indexed by position, as in the older engine, which allows fewer of them.
    """

    block: int
    unit: int
    alignment: int = 64
    table: bool = False

    def __post_init__(self) -> None:
        wrong = [
            f"{name} must be at least 1 token, got {getattr(self, name)}"
            for name in ("block", "unit", "alignment")
            if getattr(self, name) < 1
        ]
        if not wrong and self.block % self.unit:
            wrong.append(
                f"block={self.block} is no multiple of unit={self.unit}: a state would lie where no hit ends"
            )
        if wrong:
            raise ValueError("; ".join(wrong))


class Chunk(NamedTuple):
    """``count`` tokens to run, which leave the state after ``checkpoint`` tokens (0: none). A checkpoint at
    the chunk's end is the state the request itself goes on with; an earlier one is written on the way.
    """

    count: int
    checkpoint: int


def last_hit(tokens: int, unit: int) -> int:
    """The longest prefix of ``tokens`` tokens that a hit may give: one token is left to run."""
    return max(tokens - 1, 0) // unit * unit


def block_size(state_bytes: int, token_bytes: int, alignment: int) -> int:
    """Tokens whose latents take at least the bytes of a state, rounded up to ``alignment`` tokens.

    With it, states cost no more than the pages they go with. Raises ValueError for sizes below 1.
    """
    if min(state_bytes, token_bytes, alignment) < 1:
        raise ValueError(
            f"a block needs positive sizes, got state_bytes={state_bytes}, token_bytes={token_bytes}, "
            f"alignment={alignment}"
        )
    return -(-state_bytes // (token_bytes * alignment)) * alignment


def interior(grid: Grid, seen: int, end: int, total: int) -> int:
    """The token count strictly inside the chunk [seen, end) whose state it can leave on its way, or 0.

    total: tokens known. The prompt's last hit if the chunk passes it, otherwise (never with a table) the last
    multiple of the block.
    """
    goal = last_hit(total, grid.unit)
    if grid.table:
        column, initial = -(-end // grid.block) - 2, (seen - 1) // grid.block
        if end < total or seen % grid.unit or seen + grid.unit > goal or column <= initial:
            return 0
    elif not seen < goal <= end:
        goal = end // grid.block * grid.block
    legal = seen < goal < end and (goal - seen) % grid.alignment == 0
    return goal if legal else 0


def plan_chunk(grid: Grid, seen: int, granted: int, total: int, exports: bool, junction: int = 0) -> Chunk:
    """Shorten a chunk of ``granted`` tokens so that states fall where prefixes may end.

    seen: tokens already run. total: tokens known. exports: the forward can write a state on its way.
    junction: token count where another request is known to part from this one, a multiple of the unit (0:
    none). The count is at least 1 for granted >= 1: a state off the grid costs a checkpoint, a chunk of
    nothing would cost the request its turn, perhaps for good.
    """
    assert granted >= 1, f"a chunk of {granted} tokens"
    end = min(seen + granted, total)
    if total - seen <= 1:
        return Chunk(end - seen, 0)
    if exports and not grid.table:
        return _one_pass(grid, seen, end, total, junction)
    return _split(grid, seen, end, total, exports, junction)


def _one_pass(grid: Grid, seen: int, end: int, total: int, junction: int) -> Chunk:
    """The chunk is cut only where its state cannot be written on the way."""
    final = last_hit(total, grid.unit)
    if end < total:
        end = _realigned(grid, seen, end, total)
    goal = final if seen < final <= end else end // grid.block * grid.block
    if seen < junction <= end and junction != goal:
        goal = junction
        end = junction if seen < final <= end else end  # the prompt's end gets the next chunk
    if goal <= seen:
        return Chunk(end - seen, 0)
    if goal < end and (goal - seen) % grid.alignment:
        end = goal
    return Chunk(end - seen, goal)


def _realigned(grid: Grid, seen: int, end: int, total: int) -> int:
    """An earlier end, a whole number of alignments before the next state, if the next chunk may reach that
    state; otherwise the few tokens would be lost for nothing.
    """
    final = last_hit(total, grid.unit)
    following = (end // grid.block + 1) * grid.block
    ahead = final if end < final < following else following
    if ahead > final or ahead - end >= end - seen:
        return end
    earlier = end - (end - ahead) % grid.alignment
    return earlier if earlier > seen else end


def _split(grid: Grid, seen: int, end: int, total: int, exports: bool, junction: int) -> Chunk:
    """The older engine's rule: chunks end where states are kept, and the prompt's last one is the rest."""
    block, tail = grid.block, last_hit(total, grid.unit)
    if grid.table:
        junction = junction // block * block
    if end < total and end // block * block > seen:
        end = end // block * block
    if seen < junction < end:
        end = junction
    inner = interior(grid, seen, end, total) if exports else 0
    if inner:
        return Chunk(end - seen, inner)
    stops = [last_hit(total, block), tail]
    if seen % block:
        stops.append((seen // block + 1) * block)
    end = min([end, *(s for s in stops if seen < s < end)])
    kept = end % block == 0 or end in (tail, junction)
    return Chunk(end - seen, end if kept else 0)
