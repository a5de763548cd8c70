"""How many drafts of a request are kept, and what the token after them is drawn from.

    target   b_0   b_1   b_2   b_3     b_i = what the model draws from after x_1 .. x_i
    drafts      x_1   x_2   x_3        x_i was drawn from s_i-1
    chance      h_1   h_2   h_3        kept: all before the first u_i >= h_i (standard), up to the last
                                       u_i < h_i (block)
    after                              b_K when all are kept, else the positive part of p b_i - s_i,
                                       with p = 1 (standard) or p_i (block)

    standard   h_i = min(1, b(x_i) / s(x_i))
    block      p_i = min(1, p_i-1 b(x_i) / s(x_i)),  S_i = sum max(p_i b_i - s_i, 0)
               h_i = S_i / (S_i + 1 - p_i),  and p_i for the last draft

Both leave the model's distribution as it is; block keeps at least as many drafts on average. A draft that
was not drawn (one-hot) has s(x) = 1: then S_i = p_i (1 - b_i(x_i+1)), and what follows a rejection is the
target without the rejected token. Shapes: B requests, K drafts (the longest), V ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Rule = Literal["standard", "block"]
NO_DRAFT = -1  # ends a row of drafts that is shorter than the longest


class Outcome(NamedTuple):
    """accepted: [B] int64, drafts kept of each request. after: [B, V] probabilities of the next token."""

    accepted: Tensor
    after: Tensor


class Chances(NamedTuple):
    """accept: [B, K] float64, h_i. scale: [B, K+1] float64, p_i of the residual after i kept drafts."""

    accept: Tensor
    scale: Tensor


def match(chosen: Sequence[int], drafts: Sequence[int]) -> int:
    """How many leading ``drafts`` equal what the model itself chose in their place.

    The token after them is ``chosen[kept]``: of k drafts there are k + 1 chosen. With the best ids this is
    greedy verification. With ids drawn from the target it is the standard rule for drafts that were not
    drawn: x is kept with probability b(x), and what comes instead was drawn from b and is not x.
    """
    kept = 0
    while kept < len(drafts) and chosen[kept] == drafts[kept]:
        kept += 1
    return kept


def verify(rule: Rule, target: Tensor, drafts: Tensor, proposed: Tensor | None, uniforms: Tensor) -> Outcome:
    """Judge drafts by chance.

    target [B, K+1, V]: probabilities, each row shaped as plain sampling would shape it. drafts [B, K] int64,
    NO_DRAFT after a row's last; rows of target behind it are ignored. proposed [B, K, V]: what the drafts
    were drawn from, None: one-hot. uniforms [B, K] in [0, 1), independent of one another and of the drafts.
    """
    live = (drafts != NO_DRAFT).cumprod(-1).bool()
    chances = RULES[rule](target, drafts.clamp(min=0), live, proposed)
    passed = (uniforms < chances.accept) & live
    accepted = prefix(passed) if rule == "standard" else last(passed)
    return Outcome(accepted, residual(target, drafts, proposed, accepted, chances.scale))


def prefix(passed: Tensor) -> Tensor:
    """[B] how many leading places of ``passed`` [B, K] are true."""
    return passed.long().cumprod(-1).sum(-1)


def last(passed: Tensor) -> Tensor:
    """[B] the last true place of ``passed`` [B, K], counted from 1; 0 when there is none."""
    places = torch.arange(1, passed.shape[1] + 1, device=passed.device)
    return (passed * places).amax(-1) if passed.shape[1] else passed.new_zeros(len(passed), dtype=torch.int64)


def ratios(target: Tensor, drafts: Tensor, proposed: Tensor | None) -> Tensor:
    """[B, K] float64 b(x) / s(x), finite. 0 wherever the model would never draw x, also for 0 / 0."""
    b = at(target[:, :-1], drafts)
    if proposed is None:
        return b
    ratio = b / at(proposed, drafts)
    return torch.where(b > 0, ratio, 0.0).clamp(max=torch.finfo(torch.float64).max)


def at(probabilities: Tensor, ids: Tensor) -> Tensor:
    """[B, K] float64 the probability of each of ``ids`` [B, K] in ``probabilities`` [B, K, V]."""
    return probabilities.gather(2, ids[..., None])[..., 0].double()


def standard(target: Tensor, drafts: Tensor, live: Tensor, proposed: Tensor | None) -> Chances:
    """Each draft by itself."""
    accept = ratios(target, drafts, proposed).clamp(max=1.0)
    return Chances(accept, accept.new_ones(target.shape[:2]))


def block(target: Tensor, drafts: Tensor, live: Tensor, proposed: Tensor | None) -> Chances:
    """Each draft together with those before it."""
    ratio = ratios(target, drafts, proposed)
    scales = [ratio.new_ones(len(ratio))]
    for i in range(ratio.shape[1]):
        scales.append((scales[-1] * ratio[:, i]).clamp(max=1.0))
    scale = torch.stack(scales, 1)
    here = scale[:, 1:]  # p_1 .. p_K
    if proposed is None:
        rest = here[:, :-1] * (1.0 - ratio[:, 1:]).clamp(min=0.0)
    else:
        b, s = target[:, 1:-1], proposed[:, 1:]
        rest = (b * here[:, :-1, None].to(b.dtype) - s).clamp(min=0.0).sum(-1, dtype=torch.float64)
    whole = rest + (1.0 - here[:, :-1])
    inner = torch.where(whole <= 0, 1.0, rest / whole)
    followed = torch.nn.functional.pad(live[:, 1:], (0, 1))  # false at a row's last draft
    inner = torch.nn.functional.pad(inner, (0, 1))
    return Chances(torch.where(followed, inner, here), scale)


RULES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor | None], Chances]] = {
    "standard": standard,
    "block": block,
}


def residual(
    target: Tensor, drafts: Tensor, proposed: Tensor | None, accepted: Tensor, scale: Tensor
) -> Tensor:
    """[B, V] what the token after ``accepted`` [B] drafts is drawn from; sums to 1."""
    rows = torch.arange(len(target), device=target.device)
    wanted = target[rows, accepted]  # [B, V]
    # A column more, so that "all were kept" is a rejected token that there is not.
    rejected = torch.nn.functional.pad(drafts, (0, 1), value=NO_DRAFT)[rows, accepted]
    factor = scale[rows, accepted, None].to(wanted.dtype)
    if proposed is None:
        left = wanted.scatter(1, rejected.clamp(min=0)[:, None], 0.0)
    else:
        place = accepted.clamp(max=drafts.shape[1] - 1)
        left = (wanted * factor - proposed[rows, place]).clamp(min=0.0)
    # Nothing left is a rounding error of a draft that equals the target, or the draft's numbers
    # are NaN: then the target itself is the safe choice.
    total = left.sum(-1, keepdim=True)
    whole = (rejected == NO_DRAFT)[:, None] | ~(total > 0)
    left = torch.where(whole, wanted, left / total)
    return left / left.sum(-1, keepdim=True)
