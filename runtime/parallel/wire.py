"""A command of rank 0 as one row of int64 numbers, and back.

    head      MAGIC, numbers in all, kind, step, the recorder's mark, changes, forward, flags, eight sizes
    changes   code, sizes, numbers                    of each change of the pools since the last command
    body      run:    fields of the step in their order, then sources and targets of copies, logit rows
              draft:  anchors, seen, table
              stop:   nothing

Nothing but numbers travels: a follower refuses what it cannot read, and does nothing that is not written
here. T token rows, R requests (Rv of them verified), P page columns, K drafts, N rows of logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache.orders import Change, Clear, Copy, Fold, Poison, PoisonAll
from ..step import Step
from .recorder import Mark

MAGIC = 0x6B33_706C_616E_0001  # "k3plan" and the version of this layout
MOST = 1 << 26  # numbers of a command: half a GiB, far above what a step can need
HEAD, SIZES = 17, 9  # numbers of the head, and where its sizes begin
CHANGES = (Copy, Clear, Poison, Fold, PoisonAll)


class Malformed(ValueError):
    """Numbers that are no command of this version."""


class Run(NamedTuple):
    """One pass. exports: whether the forward leaves checkpoints itself. observe: whether the draft learns.

    forward: which of those that every rank was given.
    """

    step: Step
    logit_rows: Tensor  # [N]
    copies: Copy
    observe: bool = False
    exports: bool = False
    forward: int = 0


class Ask(NamedTuple):
    """One pass of the draft model."""

    anchors: Tensor  # [R]
    seen: Tensor  # [R]
    table: Tensor  # [R, P]


class Stop(NamedTuple):
    """The last command."""


BODIES = (Run, Ask, Stop)
KINDS = ("run", "draft", "stop")


class Command(NamedTuple):
    """What every rank does next. step: 1 for the first. mark: rank 0's collectives before this command.

    changes: of the pools, before anything else.
    """

    step: int
    mark: Mark
    changes: Sequence[Change]
    body: Run | Ask | Stop

    @property
    def kind(self) -> str:
        """In one word."""
        return KINDS[BODIES.index(type(self.body))]

    @property
    def rows(self) -> int:
        """Token rows of the pass, 0 where there is none."""
        return len(self.body.step.tokens) if isinstance(self.body, Run) else 0


def encode(command: Command) -> Tensor:
    """One CPU tensor [numbers] int64. Raises ValueError for more numbers than a command may have."""
    body = command.body
    forward, flags, sizes, parts = 0, 0, (), ()
    if isinstance(body, Run):
        forward, flags, sizes = body.forward, body.observe + 2 * body.exports, sizes_of(body)
        copies = torch.tensor([*body.copies.sources, *body.copies.targets], dtype=torch.int64)
        parts = (*(t.reshape(-1).long() for t in body.step), copies, body.logit_rows)
    elif isinstance(body, Ask):
        sizes = body.table.shape
        parts = (body.anchors, body.seen, body.table.reshape(-1))
    changes = [number for change in command.changes for number in numbers_of(change)]
    kind = BODIES.index(type(body))
    head = [MAGIC, 0, kind, command.step, *command.mark, len(command.changes), forward, flags]
    head += [*sizes, *[0] * (HEAD - SIZES - len(sizes))]
    head[1] = HEAD + len(changes) + sum(map(len, parts))
    if head[1] > MOST:
        raise ValueError(f"a command of {head[1]} numbers, and at most {MOST} can be sent")
    return torch.cat([torch.tensor(head + changes, dtype=torch.int64), *parts])


def sizes_of(run: Run) -> tuple[int, ...]:
    """T, R, P, Rv, K + 1, length of the export columns, copies, N."""
    step = run.step
    verified, others = len(step.cu_verify) - 1, len(step.export_slot)
    rows = (len(step.tokens), *step.pages.shape, verified, step.scratch.shape[1], others)
    return *rows, len(run.copies.sources), len(run.logit_rows)


def numbers_of(change: Change) -> list[int]:
    """Code, the lengths of its lists, what is in them."""
    lists = [list(chain(*column)) if isinstance(change, Fold) else column for column in change]
    return [CHANGES.index(type(change)), *map(len, lists), *chain(*lists)]


def length_of(head: Tensor) -> int:
    """How many numbers the command has that begins with ``head``. Raises :class:`Malformed`."""
    magic, length = head[:2].tolist()
    if magic != MAGIC:
        raise Malformed(f"what came begins with {magic:#x}: no command, or one of another version")
    if not HEAD <= length <= MOST:
        raise Malformed(f"a command of {length} numbers: there are {HEAD} to {MOST}")
    return length


def decode(numbers: Tensor) -> Command:
    """What :func:`encode` was given, in tensors of their own. Raises :class:`Malformed` for anything else."""
    length = length_of(numbers)
    if len(numbers) != length:
        raise Malformed(f"a command of {length} numbers came as {len(numbers)}")
    head = numbers[:HEAD].tolist()
    kind, step, count, digest, changed, forward, flags = head[2:SIZES]
    sizes = head[SIZES:]
    if not 0 <= kind < len(BODIES) or not 0 <= flags < 4 or step < 1 or min(forward, changed, *sizes) < 0:
        raise Malformed(f"no command has the head {head}")
    rest = Reader(numbers[HEAD:])
    changes = [change_of(rest) for _ in range(changed)]
    if BODIES[kind] is Run:
        body = Run(*run_of(rest, sizes), bool(flags & 1), bool(flags & 2), forward)
    elif BODIES[kind] is Ask:
        requests, columns = sizes[:2]
        table = rest.take(requests), rest.take(requests), rest.take(requests * columns)
        body = Ask(*table[:2], table[2].view(requests, columns))
    else:
        body = Stop()
    rest.end()
    return Command(step, Mark(count, digest), changes, body)


def run_of(rest: Reader, sizes: Sequence[int]) -> tuple[Step, Tensor, Copy]:
    """Step, logit rows and copies of a run of these sizes."""
    tokens, requests, columns, verified, states, others, copied, rows = sizes
    if verified > requests:
        raise Malformed(f"{verified} of {requests} requests are verified")
    step = Step(
        tokens=rest.take(tokens),
        spans=rest.take(3),
        cu_verify=rest.take(verified + 1),
        cu_other=rest.take(requests - verified + 1),
        slots=rest.take(requests),
        seen=rest.take(requests),
        pages=rest.take(requests * columns).view(requests, columns),
        scratch=rest.take(verified * states).view(verified, states),
        anchor=rest.take(verified),
        export_offset=rest.take(others).int(),
        export_slot=rest.take(others).int(),
    )
    copies = Copy(rest.take(copied).tolist(), rest.take(copied).tolist())
    return step, rest.take(rows), copies


def change_of(rest: Reader) -> Change:
    """The next change."""
    code = int(rest.take(1))
    if not 0 <= code < len(CHANGES):
        raise Malformed(f"no change has the code {code}")
    kind = CHANGES[code]
    lengths = rest.take(len(kind._fields)).tolist()
    lists = [rest.take(length).tolist() for length in lengths]
    return Fold(triples(lists[0])) if kind is Fold else kind(*lists)


def triples(numbers: list[int]) -> list[tuple[int, ...]]:
    """Three and three."""
    if len(numbers) % 3:
        raise Malformed(f"moves of {len(numbers)} numbers: three belong together")
    return [tuple(numbers[i : i + 3]) for i in range(0, len(numbers), 3)]


class Reader:
    """Takes numbers from the front. A piece is a tensor of its own: code that is compiled for the tensors of
    a step must not see where one lay.
    """

    def __init__(self, numbers: Tensor) -> None:
        self.numbers, self.at = numbers, 0

    def take(self, count: int) -> Tensor:
        """The next ``count``."""
        piece = self.numbers[self.at : self.at + count] if count >= 0 else self.numbers[:0]
        if len(piece) != count:
            raise Malformed(f"{count} numbers are said to come at {self.at}, {len(piece)} are there")
        self.at += count
        return piece.clone()

    def end(self) -> None:
        """Raise where something is left."""
        if self.at != len(self.numbers):
            raise Malformed(f"{len(self.numbers) - self.at} numbers are left over")
