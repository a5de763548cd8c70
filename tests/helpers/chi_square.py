"""Whether counted sequences fit the probabilities they should come with, and a verifier that makes them not.

next_probabilities(prefix) -> [V]      the model, as plain sampling shapes it
joint(...)  -> every sequence that can come, with its probability
fit(...)    -> p value of the counts: above 1e-3 is no reason for doubt
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable

import pytest
import torch
from k3compile.runtime.request import Request, SamplingParams
from k3compile.runtime.speculate import verify as rules
from k3compile.runtime.speculate.draft import Draft
from torch import Tensor

ENOUGH = 5.0  # the least expected count of a cell; rarer ones are put together


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """Of Pearson's test; ``probabilities`` sum to 1. 0 when something impossible was counted."""
    assert abs(float(probabilities.sum()) - 1) < 1e-6
    if counts[probabilities == 0].sum() > 0:
        return 0.0
    expected = probabilities.double() * counts.sum()
    rare = expected < ENOUGH
    observed = torch.cat([counts[~rare].double(), counts[rare].double().sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    assert len(expected) > 1, "one cell fits whatever comes"
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def joint(
    next_probabilities: Callable[[tuple[int, ...]], Tensor], length: int
) -> dict[tuple[int, ...], float]:
    """Every sequence of ``length`` tokens that has a probability."""
    table: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for prefix, weight in table.items():
            following = next_probabilities(prefix)
            for token in following.nonzero()[:, 0].tolist():
                longer[(*prefix, token)] = weight * float(following[token])
        table = longer
    return table


def fit(sequences: Iterable[Iterable[int]], expected: dict[tuple[int, ...], float]) -> float:
    """The p value of ``sequences``, all of one length, under the table ``expected``."""
    counted = Counter(tuple(s) for s in sequences)
    if counted.keys() - expected.keys():
        return 0.0
    counts = torch.tensor([counted[s] for s in expected])
    weights = torch.tensor(list(expected.values()), dtype=torch.float64)
    return p_value(counts, weights / weights.sum())


def forget_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every verification draw what follows a rejection from the target itself: a known mistake, which
    favours the drafts. Any test of the distribution must fail with it.
    """

    def target_itself(target, drafts, proposed, accepted, scale):
        return target[torch.arange(len(target), device=target.device), accepted]

    monkeypatch.setattr(rules, "residual", target_itself)


class Guesser:
    """A drafter that knows the model and is wrong on purpose: it gives the likeliest id the chance of the
    least likely one that can come, and so on.

    drawn: drafts are drawn from that and come with it; otherwise two in three are the model's best ids.
    """

    lookahead, taps = 0, ()

    def __init__(
        self,
        next_probabilities: Callable[[tuple[int, ...]], Tensor],
        num_drafts: int,
        drawn: bool,
        seed: int = 0,
    ) -> None:
        self.next_probabilities = functools.cache(next_probabilities)
        self.num_drafts, self.drawn = num_drafts, drawn
        self.generator = torch.Generator().manual_seed(seed)

    def observe(self, step, taps) -> None: ...

    def forget(self, request) -> None: ...

    def propose(self, requests, holdings) -> list[Draft | None]:
        return [self._propose(tuple(r.output), r.room - 1) for r in requests]

    def _propose(self, prefix: tuple[int, ...], room: int) -> Draft | None:
        tokens, probs = [], []
        for _ in range(min(self.num_drafts, room)):
            p = self.next_probabilities((*prefix, *tokens))
            ids = p.argsort(descending=True)[: int((p > 0).sum())]
            probs.append(torch.zeros_like(p).index_copy(0, ids, p[ids.flip(0)]))
            if self.drawn or torch.rand((), generator=self.generator) < 1 / 3:
                tokens.append(int(probs[-1].multinomial(1, generator=self.generator)))
            else:
                tokens.append(int(p.argmax()))
        if not tokens:
            return None
        return Draft(tokens, torch.stack(probs) if self.drawn else None)


def answers(engine, prompt: list[int], count: int, **params) -> list[list[int]]:
    """What ``count`` requests with seeds 0, 1, ... get from ``engine``, turned by hand until all ended."""
    requests = [Request(f"r{i}", prompt, SamplingParams(seed=i, **params)) for i in range(count)]
    for request in requests:
        engine.submit(request, lambda update: None)
    while engine.step():
        pass
    assert not [r for r in requests if r.finish not in ("stop", "length")]
    return [r.output for r in requests]
