"""Whether counted sequences fit the probabilities they should come with, and a verifier that makes them not.

next_probabilities(prefix) -> [V]      the model, as plain sampling shapes it
joint(...)  -> every sequence that can come, with its probability
fit(...)    -> p value of the counts: above 1e-3 is no reason for doubt
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import pytest
import torch
from k3compile.runtime.speculate import verify as rules
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
