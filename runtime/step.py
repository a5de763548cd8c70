"""What one forward pass is given: tensors that say whose token each row is.

    token rows   [ verify ........... | decode .. | prefill ............. ]  spans = (verify, decode, prefill)
    requests     [ Rv rows, cu_verify | Ro rows, cu_other ............... ]  cu_* start at 0 in their own part

KDA knows two classes of rows: verify, and other (decode and prefill as one run). MLA sees all R rows alike.
The export columns follow the other rows, since a verify row leaves its state alone and exports nothing; they
are as long as an engine's max_num_seqs whatever the step holds, for they are inputs of one size to a graph.
Names follow the design: T token rows, R requests, P page columns, K drafts.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from .work import Work


class Step(NamedTuple):
    """One forward pass. Integers are int64 unless said; ``spans`` lives on the CPU whatever the device."""

    tokens: Tensor  # [T] token ids
    spans: Tensor  # [3] CPU int64: token rows of verify, decode, prefill, in that order; they sum to T
    cu_verify: Tensor  # [Rv+1] running token counts of the verify requests, from 0
    cu_other: Tensor  # [Ro+1] the same for decode and prefill requests, rebased to 0
    slots: Tensor  # [R] state slot of each request, verify first; 0 is the null slot
    seen: Tensor  # [R] tokens of the request before this step
    pages: Tensor  # [R, P] page ids, 0 where the request has fewer
    scratch: Tensor  # [Rv, K+1] state slots for the candidate states when state_replay is off
    anchor: Tensor  # [Rv] rows accepted in the request's last verify step
    export_offset: Tensor  # [max_requests] int32, of row i of cu_other: tokens to its checkpoint, 0 = none
    export_slot: Tensor  # [max_requests] int32, of row i of cu_other: slot that receives the checkpoint


class Batch(NamedTuple):
    """A step and how to read its hidden states back."""

    step: Step
    work: list[Work]  # in row order
    samples: list[Work]  # those that get a token, in row order
    logit_rows: Tensor  # [N] rows of hidden whose logits are needed: one a sample, 1 + drafts for a verify


def build(
    work: Sequence[Work],
    max_requests: int,
    max_drafts: int = 0,
    device: str | torch.device = "cpu",
    exports: bool = False,
) -> Batch:
    """Lay a plan out as tensors on ``device``.

    max_requests: length of the export columns, which never changes. max_drafts: K. exports: whether the
    forward writes checkpoints itself; without it the columns are zero and whoever runs the step copies. A
    piece of one row is a decode row whether it comes from a prompt or not; the others keep the plan's order
    inside their class.
    """
    verify = [w for w in work if w.drafts]
    decode = [w for w in work if w.count == 1 and not w.drafts]
    prefill = [w for w in work if w.count > 1 and not w.drafts]
    rows = [*verify, *decode, *prefill]
    width = max((len(w.pages) for w in rows), default=1)

    tokens, slots, seen, logit_rows = array("q"), array("q"), array("q"), array("q")
    pages = array("q", bytes(8 * len(rows) * width))
    for i, (request, count, drafts, samples, slot, held, *_) in enumerate(rows):
        start = request.seen
        tokens.extend(request.tokens[start : start + count - drafts])
        if drafts:
            tokens.extend(request.drafts[:drafts])
        if samples:
            logit_rows.extend(range(len(tokens) - 1 - drafts, len(tokens)))
        slots.append(slot)
        seen.append(start)
        pages[i * width : i * width + len(held)] = held

    def column(values: array) -> Tensor:
        return torch.frombuffer(values, dtype=torch.int64).to(device) if values else long([])

    def long(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    counts = [sum(w.count for w in part) for part in (verify, decode, prefill)]
    export_offset, export_slot = export_columns(rows[len(verify) :] if exports else [], max_requests)
    step = Step(
        tokens=column(tokens),
        spans=torch.tensor(counts, dtype=torch.int64),
        cu_verify=long([0, *accumulate(w.count for w in verify)]),
        cu_other=long([0, *accumulate(w.count for w in (*decode, *prefill))]),
        slots=column(slots),
        seen=column(seen),
        pages=column(pages).view(len(rows), width),
        scratch=scratch_slots(verify, max_drafts + 1).to(device),
        anchor=torch.ones(len(verify), dtype=torch.int64, device=device),
        export_offset=export_offset.to(device),
        export_slot=export_slot.to(device),
    )
    return Batch(step, rows, [w for w in rows if w.samples], column(logit_rows))


def export_columns(others: Sequence[Work], length: int) -> tuple[Tensor, Tensor]:
    """Offset into its row and slot of each checkpoint of the other rows, [length] int32 both."""
    columns = torch.zeros(2, length, dtype=torch.int32)
    for i, work in enumerate(others):
        if work.checkpoint:
            columns[0, i], columns[1, i] = work.checkpoint - work.request.seen, work.checkpoint_slot
    return columns[0], columns[1]


def scratch_slots(verify: Sequence[Work], width: int) -> Tensor:
    """[Rv, width] the slots of candidate states, 0 where a request has none."""
    slots = torch.zeros(len(verify), width, dtype=torch.int64)
    for i, work in enumerate(verify):
        if work.scratch:
            slots[i, : len(work.scratch)] = torch.tensor(work.scratch)
    return slots
