"""From the logits of a step to one token a row.

    logits -> penalties, bias -> greedy: the best id
                             -> chance: / temperature -> top-k -> top-p -> min-p -> softmax -> inverse CDF

All rows at once, each with its own parameters, in float32 (float64 for a float64 model). A request draws
one uniform number a token from its own generator, so a seed gives the same tokens in whatever company.
Log-probabilities are those of the model: log-softmax of the logits as they came, before penalties and
temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .penalties import adjust
from .request import Request


class TokenLogprobs(NamedTuple):
    """Natural-log probabilities at one position. ``top`` is sorted: likelier first, then the lower id."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Choice(NamedTuple):
    """What a request got: one token, and one more for each draft that was accepted. ``error`` says why it got
    nothing. ``logprobs``: one entry a token, where they were asked for.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None


class Sampler:
    """Chooses tokens; keeps one random generator per living request."""

    def __init__(self, eos_ids: frozenset[int] = frozenset()) -> None:
        self.eos_ids = eos_ids
        self._generators: WeakKeyDictionary[Request, torch.Generator] = WeakKeyDictionary()

    def sample(
        self, logits: Tensor, requests: Sequence[Request], drafts: Sequence[int] | None = None
    ) -> list[Choice]:
        """One choice for each request, from its rows of ``logits`` [N, V].

        drafts: how many of its drafts each request had verified (None: none); it has a row more than those.
        """
        assert not any(drafts or ()), "drafts cannot be verified yet"
        raw = logits.to(torch.promote_types(logits.dtype, torch.float32))
        broken = (~torch.isfinite(raw.amax(-1))).tolist()  # argmax of NaN would be a token like any other
        scores = adjust(raw, requests, self.eos_ids)
        tokens = scores.argmax(-1)  # the first of equals
        chance = [i for i, r in enumerate(requests) if not r.params.greedy and not broken[i]]
        if chance:
            owners = [requests[i] for i in chance]
            rows = torch.tensor(chance, device=raw.device)
            tokens[rows] = pick(distribution(scores[rows], owners), self.uniforms(owners).to(raw.device))
        return self._report(raw, tokens.tolist(), broken, requests)

    def uniforms(self, requests: Sequence[Request]) -> Tensor:
        """[N] float64 in [0, 1), the next number of each request's own generator."""
        draws = torch.empty(len(requests), dtype=torch.float64)
        for i, request in enumerate(requests):
            generator = self._generators.get(request)
            if generator is None:
                generator = self._generators[request] = torch.Generator()
                if request.params.seed is None:
                    generator.seed()
                else:
                    generator.manual_seed(request.params.seed)
            draws[i] = torch.rand((), generator=generator, dtype=torch.float64)
        return draws

    def _report(
        self, raw: Tensor, tokens: list[int], broken: list[bool], requests: Sequence[Request]
    ) -> list[Choice]:
        asked = [i for i, r in enumerate(requests) if r.params.logprobs is not None and not broken[i]]
        listed: dict[int, TokenLogprobs] = {}
        if asked:
            table = raw[torch.tensor(asked, device=raw.device)].log_softmax(-1)
            listed = {
                i: list_logprobs(row, tokens[i], requests[i].params.logprobs) for i, row in zip(asked, table)
            }
        return [
            Choice([], error="the model's logits are not finite")
            if bad
            else Choice([token], [listed[i]] if i in listed else None)
            for i, (token, bad) in enumerate(zip(tokens, broken))
        ]


def distribution(scores: Tensor, requests: Sequence[Request]) -> Tensor:
    """[N, V] the probabilities a token of each row is drawn with; temperature of each request above 0."""
    params = [r.params for r in requests]
    least = torch.finfo(scores.dtype).tiny  # a client's float64 may round to 0 here, and 0 / 0 is no score
    temperature = scores.new_tensor([max(p.temperature, least) for p in params])[:, None]
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature  # at most 0: no temperature overflows
    if any(0 < p.top_k < scores.shape[1] for p in params):
        scores = keep_top_k(scores, [p.top_k for p in params])
    if any(p.top_p < 1.0 for p in params):
        scores = keep_top_p(scores, [p.top_p for p in params])
    if any(p.min_p > 0.0 for p in params):
        scores = keep_min_p(scores, [p.min_p for p in params])
    return scores.softmax(-1)


def keep_top_k(scores: Tensor, k: Sequence[int]) -> Tensor:
    """Only the k best of each row (0: all); ids as good as the k-th stay too."""
    size = scores.shape[1]
    wanted = [n if 0 < n < size else size for n in k]
    deepest = max(n for n in wanted if n < size)
    best = scores.topk(deepest, -1).values
    places = torch.tensor([min(n, deepest) for n in wanted], device=scores.device)[:, None] - 1
    limit = best.gather(1, places)
    limit[torch.tensor([n == size for n in wanted], device=scores.device)] = -torch.inf
    return scores.masked_fill(scores < limit, -torch.inf)


def keep_top_p(scores: Tensor, p: Sequence[float]) -> Tensor:
    """The fewest best ids of each row that together have probability p; of equals the lower ids go first."""
    asked = [i for i, limit in enumerate(p) if limit < 1.0]
    rows = torch.tensor(asked, device=scores.device)
    chosen, size = scores[rows], scores.shape[1]
    limit = torch.tensor([[p[i]] for i in asked], dtype=torch.float64, device=scores.device)
    mass = chosen.softmax(-1)
    # All ids below (1 - p) / size together have less than 1 - p: none is needed. A real model leaves few.
    most = int((mass * (2 * size) >= 1.0 - limit).sum(-1).max())
    best = mass.topk(most).values if 4 * most < size else mass.sort(dim=-1, descending=True).values
    wide = best.double()
    count = (wide.cumsum(-1) - wide < limit).sum(-1, keepdim=True)
    least = best.gather(1, count - 1)
    equal = mass == least
    room = count - (best > least).sum(-1, keepdim=True)
    keep = (mass > least) | (equal & (equal.cumsum(-1) <= room))
    return scores.index_copy(0, rows, chosen.masked_fill(~keep, -torch.inf))


def keep_min_p(scores: Tensor, p: Sequence[float]) -> Tensor:
    """Only ids with at least p times the probability of the row's best."""
    limit = scores.amax(-1, keepdim=True) + scores.new_tensor(p).log()[:, None]
    return scores.masked_fill(scores < limit, -torch.inf)


def pick(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """[N] the id whose stretch of the cumulated [N, V] probabilities holds ``uniforms`` [N] in [0, 1)."""
    cdf = probabilities.double().cumsum(-1)
    total = cdf[:, -1:].contiguous()
    chosen = torch.searchsorted(cdf, uniforms[:, None] * total, right=True)
    last = torch.searchsorted(cdf, total)  # the last id with any probability: rounding must not step over it
    return torch.minimum(chosen, last).clamp(max=cdf.shape[1] - 1)[:, 0]


def list_logprobs(row: Tensor, token: int, top: int) -> TokenLogprobs:
    """The chosen token's log-probability and the ``top`` best of ``row`` [V], equal ones by id."""
    best: list[tuple[int, float]] = []
    if top:
        least = row.topk(min(top, row.shape[0])).values[-1]
        ids = (row >= least).nonzero()[:, 0]
        values = row[ids].tolist()
        best = sorted(zip(ids.tolist(), values), key=lambda pair: (-pair[1], pair[0]))[:top]
    return TokenLogprobs(token, row[token].item(), tuple(best))
