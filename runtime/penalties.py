"""What a request changes in its scores before a token is chosen, for all rows of a step at once.

    repetition   ids of prompt and output: positive scores divided, negative ones multiplied
    frequency    ids of the output: minus penalty for each time
    presence     ids of the output: minus penalty once
    logit_bias   plus
    min_tokens   stop ids are out until enough is generated

in this order. A row that follows drafts takes them for output: they are what it will have been, if the row
counts at all. Only the touched places of the [N, V] scores are read and written: a key is row * V + id.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .request import Request


class Row(NamedTuple):
    """A row of scores, whose it is, and the drafts between the request's last known token and it."""

    index: int
    request: Request
    ahead: Sequence[int]


Rows = Sequence[Row]


def adjust(
    scores: Tensor,
    requests: Sequence[Request],
    eos_ids: frozenset[int],
    ahead: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """[N, V] scores of N rows, changed as their requests say. The input stays as it is.

    requests: the owner of each row. ahead: the drafts before each row (None: there are none).
    """
    changed = scores
    for step, wanted in WANTED.items():
        rows = [
            Row(i, r, ahead[i] if ahead else ())
            for i, r in enumerate(requests)
            if wanted(r, len(ahead[i]) if ahead else 0)
        ]
        if rows:
            changed = scores.clone() if changed is scores else changed
            step(changed, rows, eos_ids)
    return changed


def repeat(scores: Tensor, rows: Rows, eos_ids: frozenset[int]) -> None:
    """Make ids that already occur, in the prompt too, less likely by a factor."""
    keys = keys_of(scores, [(row.index, [row.request.tokens, array("q", row.ahead)]) for row in rows])
    penalty = per_row(scores, rows, lambda r: r.params.repetition_penalty)[keys // scores.shape[1]]
    old = scores.view(-1)[keys]  # an id that occurs twice is written twice, with the same value
    scores.view(-1)[keys] = torch.where(old > 0, old / penalty, old * penalty)


def count(scores: Tensor, rows: Rows, eos_ids: frozenset[int]) -> None:
    """Subtract the frequency penalty for each time an id was generated and the presence penalty once."""
    histories = [(i, [r.tokens[r.prompt_tokens :], array("q", ahead)]) for i, r, ahead in rows]
    keys, times = torch.unique(keys_of(scores, histories), return_counts=True)
    row = keys // scores.shape[1]
    frequency = per_row(scores, rows, lambda r: r.params.frequency_penalty)[row]
    presence = per_row(scores, rows, lambda r: r.params.presence_penalty)[row]
    scores.view(-1)[keys] -= frequency * times.to(scores.dtype) + presence


def bias(scores: Tensor, rows: Rows, eos_ids: frozenset[int]) -> None:
    """Add what the request gives for each id."""
    size = scores.shape[1]
    keys = [row.index * size + token for row in rows for token in row.request.params.logit_bias]
    values = [value for row in rows for value in row.request.params.logit_bias.values()]
    scores.view(-1)[torch.tensor(keys, device=scores.device)] += scores.new_tensor(values)


def forbid_stop(scores: Tensor, rows: Rows, eos_ids: frozenset[int]) -> None:
    """Keep every id out that would end the request too early."""
    size = scores.shape[1]
    keys = [
        i * size + token
        for i, r, _ in rows
        for token in (r.stop_ids if r.params.ignore_eos else r.stop_ids | eos_ids)
        if token < size
    ]
    scores.view(-1)[torch.tensor(keys, dtype=torch.int64, device=scores.device)] = -torch.inf


WANTED: dict[Callable[[Tensor, Rows, frozenset[int]], None], Callable[[Request, int], bool]] = {
    repeat: lambda r, ahead: r.params.repetition_penalty != 1.0,
    count: lambda r, ahead: r.params.frequency_penalty != 0.0 or r.params.presence_penalty != 0.0,
    bias: lambda r, ahead: bool(r.params.logit_bias),
    forbid_stop: lambda r, ahead: r.output_tokens + ahead < r.params.min_tokens,
}


def keys_of(scores: Tensor, histories: Sequence[tuple[int, Sequence[array]]]) -> Tensor:
    """Keys of all ids of all parts of each row's history, as often as they occur."""
    size = scores.shape[1]
    keys = [
        torch.frombuffer(ids, dtype=torch.int64) + i * size for i, parts in histories for ids in parts if ids
    ]
    return (
        torch.cat(keys).to(scores.device) if keys else torch.empty(0, dtype=torch.int64, device=scores.device)
    )


def per_row(scores: Tensor, rows: Rows, value: Callable[[Request], float]) -> Tensor:
    """[N] one parameter of each row, 0 where the row is not concerned."""
    column = [0.0] * scores.shape[0]
    for row in rows:
        column[row.index] = value(row.request)
    return scores.new_tensor(column)
