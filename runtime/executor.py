"""What one rank does with its part of the model: everything that touches tensors which every rank has.

    Engine, drafter, costs             decide; on rank 0 alone
          |
    Executor                           this rank's pools, forward, head and draft
    parallel/lead.py, follow.py        the same calls on every rank, in the same order

The engine calls an :class:`Executor`, or a ``parallel.lead.Leader``, which looks the same and lets the other
ranks do each call too. Integers come as CPU tensors and are put on the device here. T token rows, R requests,
N rows of logits, V vocabulary, D width, K drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from k3compile.kernels.choice import Compute, by_meaning
from torch import Tensor

from .cache import writes
from .cache.orders import Change, Copy, Fold, PoisonAll
from .parallel.hooks import Unwatched
from .speculate.settle import stacked
from .step import Step

if TYPE_CHECKING:
    from .speculate.dspark_block import Block, DraftBlocks

ForwardFn = Callable[[Step], tuple[Tensor, Tensor]]
Observe = Callable[[Step, Tensor], None]
NO_COPIES = Copy([], [])


class GroupLost(RuntimeError):
    """A command began on several ranks and did not end on this one: the others wait for what it left out, so
    nothing can be run any more.
    """


class Executor:
    """One rank's pools and what runs over them.

    pools: all of the engine's; own: those that the model's layers advance (None: all). forward(step) ->
    (hidden [T, D], taps). logits(hidden [N, D]) -> [N, V]. blocks: the draft model's passes (None: no draft
    model). device: where the step's tensors must be.
    """

    def __init__(
        self,
        pools: writes.Pools,
        forward: ForwardFn | None = None,
        logits: Callable[[Tensor], Tensor] | None = None,
        *,
        own: writes.Pools | None = None,
        blocks: DraftBlocks | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        self.pools = pools
        self.own = pools if own is None else own
        self.logits, self.blocks, self.device = logits, blocks, torch.device(device)
        self.forwards: list[ForwardFn] = []  # every one that was given, so that ranks can name one by number
        self.number = -1
        self.watch = Unwatched()  # of the ranks; one alone needs none
        if forward is not None:
            self.use(forward)

    @property
    def forward(self) -> ForwardFn:
        """The forward in use."""
        return self.forwards[self.number]

    @property
    def compute(self) -> Compute:
        """What computes ops outside the layers: as a compiled forward chooses, else their meanings."""
        return getattr(self.forward, "compute", by_meaning) if self.forwards else by_meaning

    @property
    def exports(self) -> bool:
        """Whether the forward leaves checkpoints inside a row, so that nobody has to copy them."""
        return bool(getattr(self.forward, "exports", False))

    def use(self, forward: ForwardFn) -> None:
        """Run ``forward`` from now on. On several ranks each must be given its own, in the same order, before
        rank 0 runs it.
        """
        known = [number for number, one in enumerate(self.forwards) if one is forward]
        if not known:
            self.forwards.append(forward)
        self.number = known[0] if known else len(self.forwards) - 1

    def write(self, changes: Sequence[Change]) -> None:
        """Change the pools as asked, in this order."""
        for change in changes:
            if isinstance(change, Fold):
                self._fold(change)
            elif isinstance(change, PoisonAll):
                writes.poison_all(self.pools)
            else:
                writes.apply(self.pools, [change])

    def run(
        self, step: Step, logit_rows: Tensor, copies: Copy = NO_COPIES, observe: Observe | None = None
    ) -> Tensor | None:
        """One pass: the logits [N, V] of rows [N] of its hidden states, None where there are none.

        copies: states of slots that are kept, once the pass has written them. observe: learns from the pass,
        before anything else happens.
        """
        step = on_device(step, self.device)
        hidden, taps = self.forward(step)
        if observe is not None:
            observe(step, taps)
        writes.copy(self.pools, *copies)
        if not len(logit_rows):
            return None
        logits = getattr(self.forward, "logits", self.logits)  # a compiled forward may bring its own
        return logits(hidden.index_select(0, logit_rows.to(self.device)))

    def draft(self, anchors: Tensor, seen: Tensor, table: Tensor) -> Block:
        """One pass of the draft model: a block for each anchor token [R] at position seen [R], with the pages
        of table [R, P].
        """
        places = (given.to(self.device) for given in (anchors, seen, table))
        return self.blocks.run(*places, self.compute)

    def stop(self) -> None:
        """Nothing more is run; followers, where there are any, end."""

    def _fold(self, fold: Fold) -> None:
        if fold.moves and self._states is not None:
            slots, rows, into = torch.tensor(fold.moves).unbind(1)
            self.compute("kda_commit", *self._states, slots, rows, into)

    @cached_property
    def _states(self):
        """The KDA pools of all layers as one, None without any."""
        return stacked(self.own)


def on_device(step: Step, device: torch.device) -> Step:
    """The step with its tensors there, but for ``spans``, which stays where it is."""
    if step.tokens.device == device:
        return step
    return Step(*(t if name == "spans" else t.to(device) for name, t in zip(Step._fields, step)))
