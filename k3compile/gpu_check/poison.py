"""No implementation reads or writes what is not its call's: rows that the meaning leaves alone hold NaN.

    state  [s0 s1 s2 s3]   slots [2]    -->   [NaN NaN s2 NaN]    the meaning's results are what they were,
                                              so must ours be; and what was NaN has the same bits afterwards

Which rows those are is asked of the meaning: one that may be NaN without a result changing is not read, and
one that still holds the same bits is not written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.op import Op
from .exactness import (
    Verdict,
    fitting,
    judge_one,
    names_of,
    note_disturbed,
    outcome,
    result_names,
    tolerance_of,
)
from .rooms import bits, moved_in

MOST_NUMBERS = 12_000  # floats of a call; larger ones take the meaning too long
PAGED = ("pages",)  # read by row and place


def spared(op: Op, args: Sequence[Any]) -> list[tuple[int, Tensor]]:
    """(argument, rows) that the meaning neither reads nor writes; see :func:`depth` for what a row is."""
    clean = outcome(op, op.meaning, moved_in(args)[0])
    found = []
    for i, arg in enumerate(args):
        if not isinstance(arg, Tensor) or not arg.is_floating_point() or arg.dim() < 2 or not arg.numel():
            continue

        def untouched(rows: Tensor, i: int = i) -> bool:
            return not disturbs(op, args, i, rows, clean)

        count = arg.shape[: depth(op, i, arg)].numel()
        if rows := searched(torch.arange(count), untouched):
            found.append((i, torch.cat(rows)))
    return found


def depth(op: Op, i: int, x: Tensor) -> int:
    """How many leading dimensions name a row of argument i: two in pools, one elsewhere."""
    name = names_of(op)[i]
    return 2 if x.dim() > 2 and (name in op.writes or name in PAGED) else 1


def split(rows: Tensor, x: Tensor, dims: int) -> tuple[Tensor, ...]:
    """Flat numbers of rows as an index of the leading dimensions."""
    rows = rows.to(x.device)
    return (rows,) if dims == 1 else (rows // x.shape[1], rows % x.shape[1])


def searched(rows: Tensor, untouched: Callable[[Tensor], bool]) -> list[Tensor]:
    """Those that are, by halves: most tensors are read whole or hardly at all."""
    if untouched(rows):
        return [rows]
    if len(rows) == 1:
        return []
    half = len(rows) // 2
    return searched(rows[:half], untouched) + searched(rows[half:], untouched)


def disturbs(op: Op, args: Sequence[Any], i: int, rows: Tensor, clean: list[Tensor]) -> bool:
    """Whether NaN in these rows of argument i changes a result of the meaning, or is written over."""
    poisoned = moved_in(args)[0]
    at = split(rows, poisoned[i], depth(op, i, poisoned[i]))
    poisoned[i][at] = torch.nan
    before = bits(poisoned[i][at])
    results = outcome(op, op.meaning, poisoned)
    if not torch.equal(before, bits(poisoned[i][at])):
        return True
    for name, got, want in zip(result_names(op, len(clean)), results, clean):
        if name == names_of(op)[i]:
            want = want.clone()
            want[at] = torch.nan
        if not torch.equal(bits(got), bits(want)):
            return True
    return False


def check(
    op: Op,
    provider: str,
    args: Sequence[Any],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Verdict:
    """What an implementation does to memory that is not its call's. args: a call on the CPU."""
    found = Verdict(op.name, provider, str(dtype).removeprefix("torch."))
    implementation = op.implementations[provider]
    poisoned = moved_in(args)[0]
    where = [(i, split(rows, args[i], depth(op, i, args[i]))) for i, rows in spared(op, args)]
    for i, at in where:
        poisoned[i][at] = torch.nan
    there, why = fitting(implementation, moved_in(poisoned, device)[0])
    if why is not None:
        found.refused[why] += 1
        return found
    inside, rooms = moved_in(there, device)
    where = [(i, tuple(n.to(device) for n in at)) for i, at in where]
    before = {i: bits(inside[i][at]) for i, at in where}
    got = outcome(op, implementation.fn, inside)
    found.calls += 1
    note_disturbed(found, rooms)
    for i, at in where:
        if not torch.equal(before[i], bits(inside[i][at])):
            found.wrong.append(f"rows of {names_of(op)[i]} that are not the call's were written")
    truth = outcome(op, op.meaning, moved_in(poisoned, wide=True)[0])
    for name, g, t in zip(result_names(op, len(truth)), got, truth, strict=True):
        if complaint := judge_one(found, name, g.to(t.device), t, t, tolerance_of(op, provider).of(dtype)):
            found.wrong.append(f"{name} with NaN beside it: {complaint}")
    found.distances.clear()  # of one call, they would be chance
    return found


def calls(op: Op, dtype: torch.dtype, most: int = MOST_NUMBERS) -> list[tuple]:
    """Samples of an op that are small enough to be looked at row by row and have something in them; where
    rows end by ``cu``, once more with a last token row that is nobody's.
    """
    whole = [args for args in op.each_sample(dtype) if 0 < numbers(args) <= most]
    return [*whole, *(cut for args in whole if (cut := with_a_row_of_nobody(op, args)) is not None)]


def numbers(args: Sequence[Any]) -> int:
    """Floats of all tensors; 0 where one is empty."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    return sum(a.numel() for a in tensors if a.is_floating_point()) if all(a.numel() for a in tensors) else 0


def with_a_row_of_nobody(op: Op, args: Sequence[Any]) -> tuple | None:
    """The call with one token less in its last row, or None where the op knows no rows or would refuse it."""
    names = names_of(op)
    if "cu" not in names:
        return None
    at = names.index("cu")
    cu = args[at].clone()
    if cu[-1] - cu[-2] < 2:
        return None
    cu[-1] -= 1
    shorter = (*args[:at], cu, *args[at + 1 :])
    try:
        op.meaning(*moved_in(shorter)[0])
    except ValueError:
        return None
    return shorter
