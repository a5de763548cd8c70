"""After the verdict of a step: bring the state of each verified request to the end of the rows it keeps.

    rows of a request    a d1 d2 | d3 d4          a: its last token; of the drafts two are kept, so three rows
    replay               S (slot)          ->  commit 3 records  ->  S3 in the same slot
    no replay            S1 S2 S3 S4 S5 (scratch)               ->  the request lives in the slot of S3 now

Where a checkpoint lies inside the kept rows, the state there goes to the checkpoint's slot, conv window and
all, before the request's own moves on. A request that ends moves on as well, for its last state may be kept;
one that failed or is gone does not. What moves is decided here, on rank 0 alone, and written by all who have
pools. L KDA layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ..cache.orders import Change, Copy, Fold
from ..cache.pools import KdaPools, MlaPools

if TYPE_CHECKING:
    from ..cache.cache import Holding
    from ..request import Request
    from ..step import Batch
    from ..work import Verdict
    from .speculation import Settle

Pools = Sequence[KdaPools | MlaPools]
Write = Callable[[Sequence[Change]], None]
HoldingOf = Callable[["Request"], "Holding"]


def settler(write: Write, state_replay: bool, holding: HoldingOf) -> Settle:
    """What settles verify rows. write: of the engine's executor. holding: ``Cache.holding``."""
    return Commit(write) if state_replay else Rotate(write, holding)


class Commit:
    """State replay: one call folds the kept records into the states of all requests and layers."""

    def __init__(self, write: Write) -> None:
        self.write = write

    def __call__(self, batch: Batch, verdicts: Sequence[Verdict]) -> None:
        """Raises ValueError, before anything is written, for what :func:`verified` refuses."""
        moves: list[tuple[int, int, int]] = []
        for verdict in verified(verdicts):
            slot = verdict.work.slot
            if verdict.checkpoint:
                moves.append((slot, rows_to_checkpoint(verdict), verdict.checkpoint_slot))
            moves.append((slot, verdict.rows, slot))
        if moves:
            self.write([Fold(moves)])


class Rotate:
    """No replay: the state after every row is in a slot of the request, and another one becomes its own."""

    def __init__(self, write: Write, holding: HoldingOf) -> None:
        self.write, self.holding = write, holding

    def __call__(self, batch: Batch, verdicts: Sequence[Verdict]) -> None:
        """Raises ValueError, before anything is written, for what :func:`verified` refuses, and where a
        request keeps no row: the state before its first one is gone.
        """
        kept = list(verified(verdicts))
        for verdict in kept:
            if not verdict.rows:
                raise ValueError(
                    f"{verdict.work.request!r} keeps none of its {verdict.work.count} verified rows; without "
                    "state replay at least the first one has to be kept"
                )
        ends = [v for v in kept if v.checkpoint]
        sources = [v.work.scratch[rows_to_checkpoint(v) - 1] for v in ends]
        if ends:
            self.write([Copy(sources, [v.checkpoint_slot for v in ends])])
        for verdict in kept:
            work = verdict.work
            self.holding(work.request).slot = work.scratch[verdict.rows - 1]


def verified(verdicts: Sequence[Verdict]) -> Iterator[Verdict]:
    """The verdicts over rows with drafts whose request is still there.

    Raises ValueError for a number of rows that the request did not have in the step.
    """
    for verdict in verdicts:
        work = verdict.work
        if not work.drafts or work.request.finish is not None or verdict.error is not None:
            continue
        if not 0 <= verdict.rows <= work.count:
            raise ValueError(f"{work.request!r} keeps {verdict.rows} rows of {work.count} verified ones")
        yield verdict


def rows_to_checkpoint(verdict: Verdict) -> int:
    """How many rows lead to the checkpoint. Raises ValueError where it lies outside the kept ones."""
    work = verdict.work
    rows = verdict.checkpoint - work.request.seen
    if not 1 <= rows <= verdict.rows:
        raise ValueError(
            f"the checkpoint of {work.request!r} at {verdict.checkpoint} tokens lies outside its "
            f"{verdict.rows} kept rows"
        )
    return rows


def stacked(pools: Pools) -> KdaPools | None:
    """The KDA pools of all layers as one, [L, ..] each: the tensors that ``make_pools`` cut into layers.

    None for a model without KDA layers.
    """
    layers = [pool for pool in pools if isinstance(pool, KdaPools)]
    return KdaPools(*map(whole, zip(*layers, strict=True))) if layers else None


def whole(parts: Sequence[Tensor]) -> Tensor:
    """The tensor [L, ..] of which ``parts`` are the equally spaced slices."""
    first = parts[0]
    apart = parts[1].storage_offset() - first.storage_offset() if len(parts) > 1 else 0
    for i, part in enumerate(parts):
        assert part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr(), "pools lie apart"
        assert part.storage_offset() == first.storage_offset() + i * apart, "layers are not equally spaced"
        assert (part.shape, part.stride()) == (first.shape, first.stride())
    return first.as_strided((len(parts), *first.shape), (apart, *first.stride()))
