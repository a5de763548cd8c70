"""What a request changes in its scores before a token is chosen, for all rows of a step at once.

    repetition   ids of prompt and output: positive scores divided, negative ones multiplied
    frequency    ids of the output: minus penalty for each time
    presence     ids of the output: minus penalty once
    logit_bias   plus
    min_tokens   stop ids are out until enough is generated

in this order. Only the touched places of the [N, V] scores are read and written: a key is row * V + id.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .request import Request


def adjust(scores: Tensor, requests: Sequence[Request], eos_ids: frozenset[int]) -> Tensor:
    """[N, V] scores of N rows, changed as their requests say. The input stays as it is."""
    steps = (repeat, count, bias, forbid_stop)
    changed = scores
    for step in steps:
        rows = [(i, r) for i, r in enumerate(requests) if WANTED[step](r)]
        if rows:
            changed = scores.clone() if changed is scores else changed
            step(changed, rows, eos_ids)
    return changed


Rows = Sequence[tuple[int, Request]]


def repeat(scores: Tensor, rows: Rows, eos_ids: frozenset[int]) -> None:
    """Make ids that already occur, in the prompt too, less likely by a factor."""
    keys, _ = occurrences(scores, [(i, r.tokens) for i, r in rows])
    penalty = per_row(scores, rows, lambda r: r.params.repetition_penalty)[keys // scores.shape[1]]
    old = scores.view(-1)[keys]
    scores.view(-1)[keys] = torch.where(old > 0, old / penalty, old * penalty)


def count(scores: Tensor, rows: Rows, eos_ids: frozenset[int]) -> None:
    """Subtract the frequency penalty for each time an id was generated and the presence penalty once."""
    keys, times = occurrences(scores, [(i, r.tokens[r.prompt_tokens :]) for i, r in rows])
    row = keys // scores.shape[1]
    frequency = per_row(scores, rows, lambda r: r.params.frequency_penalty)[row]
    presence = per_row(scores, rows, lambda r: r.params.presence_penalty)[row]
    scores.view(-1)[keys] -= frequency * times + presence


def bias(scores: Tensor, rows: Rows, eos_ids: frozenset[int]) -> None:
    """Add what the request gives for each id."""
    size = scores.shape[1]
    keys = [i * size + token for i, r in rows for token in r.params.logit_bias]
    values = [value for _, r in rows for value in r.params.logit_bias.values()]
    scores.view(-1)[torch.tensor(keys, device=scores.device)] += scores.new_tensor(values)


def forbid_stop(scores: Tensor, rows: Rows, eos_ids: frozenset[int]) -> None:
    """Keep every id out that would end the request too early."""
    size = scores.shape[1]
    keys = [
        i * size + token
        for i, r in rows
        for token in (r.stop_ids if r.params.ignore_eos else r.stop_ids | eos_ids)
        if token < size
    ]
    scores.view(-1)[torch.tensor(keys, dtype=torch.int64, device=scores.device)] = -torch.inf


WANTED: dict[Callable, Callable[[Request], bool]] = {
    repeat: lambda r: r.params.repetition_penalty != 1.0,
    count: lambda r: r.params.frequency_penalty != 0.0 or r.params.presence_penalty != 0.0,
    bias: lambda r: bool(r.params.logit_bias),
    forbid_stop: lambda r: r.output_tokens < r.params.min_tokens,
}


def occurrences(scores: Tensor, rows: Sequence[tuple[int, array]]) -> tuple[Tensor, Tensor]:
    """Distinct keys of the ids that occur in each row, and how often."""
    size = scores.shape[1]
    keys = [torch.frombuffer(ids, dtype=torch.int64) + i * size for i, ids in rows if ids]
    if not keys:
        return torch.empty(0, dtype=torch.int64, device=scores.device), scores.new_empty(0)
    distinct, times = torch.unique(torch.cat(keys), return_counts=True)
    return distinct.to(scores.device), times.to(scores.device, scores.dtype)


def per_row(scores: Tensor, rows: Rows, value: Callable[[Request], float]) -> Tensor:
    """[N] one parameter of each row, 0 where the row is not concerned."""
    column = [0.0] * scores.shape[0]
    for i, request in rows:
        column[i] = value(request)
    return scores.new_tensor(column)
