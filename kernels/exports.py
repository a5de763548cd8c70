"""Which rows of a call leave a checkpoint, and where: the two export columns, read and checked.

    cu             0 ........ 200 .. 203        row 0: 200 tokens, row 1: 3
    export_offset  128        0   0             row 0: its state after 128 tokens ..
    export_slot    7          0   0             .. goes to slot 7; row 1 leaves nothing

Both columns are int32 of one fixed length: entry i belongs to row i of the call's own ``cu``, entries past
the rows are ignored, rows past the entries leave nothing. Everything is checked before anything is written.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from torch import Tensor


class Export(NamedTuple):
    """The state of ``row`` after its first ``offset`` tokens, 1 or more, goes to ``slot``."""

    row: int
    offset: int
    slot: int


def offsets_of(export_offset: Tensor, bounds: list[int]) -> list[int]:
    """The offset of each row, 0 for none.

    Raises ValueError, with row, value and what is allowed, for one outside 0 .. the row's length.
    """
    offsets = export_offset[: len(bounds) - 1].tolist()
    if any(offsets):
        for row, (offset, (begin, end)) in enumerate(zip(offsets, pairwise(bounds))):
            if not 0 <= offset <= end - begin:
                raise ValueError(
                    f"export_offset of row {row} is {offset}; the row has {end - begin} tokens, "
                    f"so it must lie in 0..{end - begin} (0: no checkpoint)"
                )
    return offsets


def exports_of(
    export_offset: Tensor, export_slot: Tensor, slots: Tensor, bounds: list[int], count: int
) -> list[Export]:
    """The rows with an offset; ``count`` slots exist and rows live in ``slots`` [R]. No slot is special here.

    Raises ValueError, with row, value and what is allowed, for an offset outside the row, a slot that does
    not exist, one that a row of this call lives in (its own as well), and one that two rows export to.
    """
    offsets = offsets_of(export_offset, bounds)
    if not any(offsets):
        return []
    if len(export_slot) != len(export_offset):
        raise ValueError(
            f"export_offset has {len(export_offset)} entries and export_slot {len(export_slot)}: "
            "they must have one for each row, and as many"
        )
    places, live, taken = export_slot[: len(offsets)].tolist(), slots.tolist(), {}
    found = [Export(row, offset, places[row]) for row, offset in enumerate(offsets) if offset]
    for row, _, slot in found:
        if not 0 <= slot < count:
            raise ValueError(f"export_slot of row {row} is {slot}; it must lie in 0..{count - 1}")
        if slot in live:
            raise ValueError(
                f"export_slot of row {row} is {slot}, where row {live.index(slot)} of this call keeps its "
                "state; it must be a slot that no row of the call lives in"
            )
        if slot in taken:
            raise ValueError(
                f"export_slot of row {row} is {slot}, to which row {taken[slot]} exports as well; "
                "each row needs a slot of its own"
            )
        taken[slot] = row
    return found
