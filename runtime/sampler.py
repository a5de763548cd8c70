"""From the logits of a step to the tokens of each request.

    logits -> penalties, bias -> greedy: the best id
                             -> chance: / temperature -> top-k -> top-p -> min-p -> softmax -> inverse CDF

    drafts of a request    x_1    x_2    x_3
    its rows of logits   0      1      2      3       row i: what follows the drafts before it
    it gets              x_1    x_2    y              those kept, and one token more

All rows at once, each with its own parameters, in float32 (float64 for a float64 model). The distribution
that drafts are verified against is the one plain sampling would draw from. A request draws its uniform
numbers from its own generator, so a seed gives the same tokens in whatever company: without drafts, and under
the standard rule with drafts that were not drawn. Otherwise the distribution is the same, but the tokens of a
seed hang on how many drafts each step had room for. Log-probabilities are those of the model: log-softmax of
the logits as they came, before penalties and temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .penalties import adjust
from .request import Request
from .speculate.verify import NO_DRAFT, Rule, match, verify


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


class Part(NamedTuple):
    """A request's rows of the logits: ``first`` to ``last``, one more than ``drafts``."""

    request: Request
    first: int
    last: int
    drafts: list[int]

    @property
    def rows(self) -> range:
        return range(self.first, self.last + 1)

    @property
    def drawn_from(self) -> Tensor | None:
        """[k, V] what the drafts were drawn from, None when they were not drawn."""
        proposal = self.request.proposal
        if not self.drafts or proposal is None or proposal.probs is None:
            return None
        assert proposal.tokens[: len(self.drafts)] == self.drafts, "drafts of another proposal"
        return proposal.probs[: len(self.drafts)]


class Chance:
    """The uniform numbers of one request, in [0, 1), in order. What was not used comes again."""

    def __init__(self, seed: int | None) -> None:
        self._generator = torch.Generator()
        self._spare: list[float] = []
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def take(self, count: int) -> list[float]:
        """The next ``count`` numbers."""
        while len(self._spare) < count:
            self._spare.append(torch.rand((), generator=self._generator, dtype=torch.float64).item())
        taken, self._spare = self._spare[:count], self._spare[count:]
        return taken

    def give_back(self, numbers: list[float]) -> None:
        """Put the last ones taken back."""
        self._spare = numbers + self._spare


class Sampler:
    """Chooses tokens; keeps the uniform numbers of each living request.

    rule: how drafts of sampled requests are verified, "block" or "standard".
    """

    def __init__(self, eos_ids: frozenset[int] = frozenset(), rule: Rule = "block") -> None:
        self.eos_ids = eos_ids
        self.rule = rule
        self._chances: WeakKeyDictionary[Request, Chance] = WeakKeyDictionary()

    def sample(
        self, logits: Tensor, requests: Sequence[Request], drafts: Sequence[int] | None = None
    ) -> list[Choice]:
        """One choice for each request, from its rows of ``logits`` [N, V].

        drafts: how many of its drafts each request had verified (None: none); it has a row more than those.
        A request with a row that is not finite gets an error, its neighbours do not notice.
        """
        parts = split(requests, drafts)
        assert sum(1 + len(part.drafts) for part in parts) == len(logits), "rows do not fit the drafts"
        rows, ahead = requests, None
        if len(logits) > len(parts):
            rows = [part.request for part in parts for _ in part.rows]
            ahead = [part.drafts[:i] for part in parts for i in range(len(part.rows))]
        raw = logits.to(torch.promote_types(logits.dtype, torch.float32))
        bad = (~torch.isfinite(raw.amax(-1))).tolist()  # argmax of NaN would be a token like any other
        scores = adjust(raw, rows, self.eos_ids, ahead)
        sound = [part for part in parts if not any(bad[part.first : part.last + 1])] if any(bad) else parts
        tokens = self._choose(scores, sound)
        logprobs = list_all(raw, sound, tokens)
        return [
            Choice(tokens[part.first], logprobs.get(part.first))
            if part.first in tokens
            else Choice([], error="the model's logits are not finite")
            for part in parts
        ]

    def _choose(self, scores: Tensor, parts: Sequence[Part]) -> dict[int, list[int]]:
        """What each part's request gets, by the part's first row, from the adjusted ``scores`` [N, V]."""
        best = scores.argmax(-1)  # the first of equals
        chance = [part for part in parts if not part.request.params.greedy]
        judged = [part for part in chance if part.drafts and not self._coupled(part)]
        drawn = [part for part in chance if not part.drafts or self._coupled(part)] if judged else chance
        numbers = {part.first: self.chance(part.request).take(len(part.rows)) for part in drawn}
        tokens: dict[int, list[int]] = {}
        if chance:
            rows = [row for part in (*drawn, *judged) for row in part.rows]
            owners = [part.request for part in (*drawn, *judged) for _ in part.rows]
            probabilities = distribution(scores[torch.tensor(rows, device=scores.device)], owners)
            uniforms = [u for part in drawn for u in numbers[part.first]]
            places = torch.tensor(rows[: len(uniforms)], dtype=torch.int64, device=scores.device)
            column = torch.tensor(uniforms, dtype=torch.float64, device=scores.device)
            best[places] = pick(probabilities[: len(uniforms)], column)
            tokens = self._judge(probabilities[len(uniforms) :], judged)
        chosen = best.tolist()
        for part in parts:
            if part.first in tokens:
                continue
            kept = match(chosen[part.first : part.last + 1], part.drafts) if part.drafts else 0
            tokens[part.first] = chosen[part.first : part.first + kept + 1]
            if part.drafts and part.first in numbers:
                self.chance(part.request).give_back(numbers[part.first][kept + 1 :])
        return tokens

    def _coupled(self, part: Part) -> bool:
        """Whether drafts are kept where they are what plain sampling draws with the same numbers.

        For drafts that were not drawn this is the standard rule, and a seed gives the same tokens with and
        without speculation.
        """
        return self.rule == "standard" and part.drawn_from is None

    def _judge(self, probabilities: Tensor, parts: Sequence[Part]) -> dict[int, list[int]]:
        """What the requests get whose drafts are judged; ``probabilities`` are their rows, in order."""
        starts = list(accumulate((len(part.rows) for part in parts), initial=0))
        tokens: dict[int, list[int]] = {}
        for was_drawn in (False, True):
            group = [(s, p) for s, p in zip(starts, parts) if (p.drawn_from is not None) == was_drawn]
            if group:
                tokens |= self._judge_alike(probabilities, *zip(*group))
        return tokens

    def _judge_alike(
        self, probabilities: Tensor, starts: Sequence[int], parts: Sequence[Part]
    ) -> dict[int, list[int]]:
        """The same for requests whose drafts were all drawn, or all not."""
        most, device = max(len(part.drafts) for part in parts), probabilities.device
        rows = [[s + min(i, len(p.drafts)) for i in range(most + 1)] for s, p in zip(starts, parts)]
        drafts = [p.drafts + [NO_DRAFT] * (most - len(p.drafts)) for p in parts]
        numbers = [self.chance(p.request).take(len(p.rows)) for p in parts]
        uniforms = [u[:-1] + [0.0] * (most + 1 - len(u)) for u in numbers]
        sources = [part.drawn_from for part in parts]
        proposed = None
        if sources[0] is not None:
            proposed = torch.nn.utils.rnn.pad_sequence(sources, batch_first=True).to(probabilities)
        kept, after = verify(
            self.rule,
            probabilities[torch.tensor(rows, device=device)],
            torch.tensor(drafts, device=device),
            proposed,
            torch.tensor(uniforms, dtype=torch.float64, device=device),
        )
        last = torch.tensor([u[-1] for u in numbers], dtype=torch.float64, device=device)
        counts, ends = torch.stack([kept, pick(after, last)]).tolist()
        return {p.first: [*p.drafts[:count], end] for p, count, end in zip(parts, counts, ends)}

    def chance(self, request: Request) -> Chance:
        """The uniform numbers of a request."""
        found = self._chances.get(request)
        if found is None:
            found = self._chances[request] = Chance(request.params.seed)
        return found


def split(requests: Sequence[Request], drafts: Sequence[int] | None) -> list[Part]:
    """Whose rows are where."""
    if drafts is None or not any(drafts):
        return [Part(request, i, i, []) for i, request in enumerate(requests)]
    parts, first = [], 0
    for request, count in zip(requests, drafts, strict=True):
        assert 0 <= count <= len(request.drafts), f"{request!r} has not {count} drafts"
        parts.append(Part(request, first, first + count, request.drafts[:count]))
        first += count + 1
    return parts


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


def list_all(
    raw: Tensor, parts: Sequence[Part], tokens: dict[int, list[int]]
) -> dict[int, list[TokenLogprobs]]:
    """One entry for each token of the requests that ask for them, from the model's own logits."""
    asked = [part for part in parts if part.request.params.logprobs is not None]
    if not asked:
        return {}
    rows = [row for part in asked for row in part.rows[: len(tokens[part.first])]]
    table = iter(raw[torch.tensor(rows, device=raw.device)].log_softmax(-1))
    return {
        part.first: [list_logprobs(next(table), t, part.request.params.logprobs) for t in tokens[part.first]]
        for part in asked
    }


def list_logprobs(row: Tensor, token: int, top: int) -> TokenLogprobs:
    """The chosen token's log-probability and the ``top`` best of ``row`` [V], equal ones by id."""
    best: list[tuple[int, float]] = []
    if top:
        least = row.topk(min(top, row.shape[0])).values[-1]
        ids = (row >= least).nonzero()[:, 0]
        values = row[ids].tolist()
        best = sorted(zip(ids.tolist(), values), key=lambda pair: (-pair[1], pair[0]))[:top]
    return TokenLogprobs(token, row[token].item(), tuple(best))
