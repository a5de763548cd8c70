"""What one forward pass is given: tensors that say whose token each row is.

    token rows   [ verify ............ | decode .. | prefill .............. ]    spans = (verify, decode, prefill)
    requests     [ Rv rows, cu_verify  | Ro rows, cu_other ............... ]    cu_* start at 0 in their own part

KDA knows two classes of rows: verify, and other (decode and prefill as one run). MLA sees all R rows alike.
Names follow the design: T token rows, R requests, P page columns, K drafts.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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
    export_offset: Tensor  # [max_requests] int32: checkpoint after so many tokens of the row, 0 = none
    export_slot: Tensor  # [max_requests] int32: slot that receives the checkpoint
