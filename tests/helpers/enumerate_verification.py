"""The exact distribution of what verification lets out, by walking every draft and every outcome.

    draft x_1..x_k  (V^k of them, weight s)  x  every pattern of u_i < h_i  (2^k, weight h and 1 - h)
      -> tokens kept + one from ``after`` + the rest from the model itself  ->  table over V^(k+1) sequences

Models are trees: level i holds the distribution that follows each of the V^i prefixes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from k3compile.runtime.speculate import verify as rules
from torch import Tensor

Tree = list[Tensor]  # level i: [V ** i, V]


def random_tree(vocabulary: int, depth: int, seed: int, shape: Callable[[Tensor], Tensor]) -> Tree:
    """``depth`` levels; ``shape`` turns logits [N, V] into probabilities."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [vocabulary**i for i in range(depth)]
    return [shape(torch.randn(n, vocabulary, generator=generator, dtype=torch.float64) * 2) for n in sizes]


def sequence_probabilities(tree: Tree) -> Tensor:
    """[V ** depth] the probability of each sequence under ``tree``."""
    total = tree[0].new_ones(1)
    for level in tree:
        total = (total[:, None] * level).reshape(-1)
    return total


def rows_along(tree: Tree, drafts: Tensor) -> Tensor:
    """[B, depth, V] the distributions met on the way down ``drafts`` [B, depth - 1 or more]."""
    vocabulary, place = tree[0].shape[1], torch.zeros(len(drafts), dtype=torch.int64)
    met = []
    for i, level in enumerate(tree):
        met.append(level[place])
        if i < drafts.shape[1]:
            place = place * vocabulary + drafts[:, i]
    return torch.stack(met, 1)


def all_drafts(vocabulary: int, k: int) -> Tensor:
    """[V ** k, k] every sequence, in the order of :func:`sequence_probabilities`."""
    return torch.tensor(list(itertools.product(range(vocabulary), repeat=k)))


def outcomes(rule: str, model: Tree, drafts: Tensor, proposed: Tensor | None) -> tuple[Tensor, Tensor]:
    """[B, V ** (k + 1)] what comes out for each of ``drafts`` [B, k], and [B] the mean number kept.

    ``model`` has k + 1 levels. Uniforms are put just below and exactly at h_i, so that the comparison of the
    real code decides.
    """
    size, k = drafts.shape
    vocabulary = model[0].shape[1]
    target = rows_along(model, drafts)
    live = torch.ones_like(drafts, dtype=torch.bool)
    accept = rules.RULES[rule](target, drafts, live, proposed).accept
    table = torch.zeros(size, vocabulary ** (k + 1), dtype=torch.float64)
    mean = torch.zeros(size, dtype=torch.float64)
    for pattern in itertools.product([False, True], repeat=k):
        passes = torch.tensor(pattern).expand(size, k)
        weight = torch.where(passes, accept, 1 - accept).prod(-1)
        uniforms = torch.where(passes, accept * (1 - 1e-15) - 1e-300, accept)
        outcome = rules.verify(rule, target, drafts, proposed, uniforms)
        mean += weight * outcome.accepted
        for row in range(size):
            if weight[row] > 0:
                kept = drafts[row, : outcome.accepted[row]].tolist()
                table[row] += weight[row] * continued(model, kept, outcome.after[row])
    return table, mean


def continued(model: Tree, kept: list[int], after: Tensor) -> Tensor:
    """[V ** depth] the sequences that begin with ``kept``, go on by ``after`` and then by the model."""
    vocabulary, place = len(after), 0
    for token in kept:
        place = place * vocabulary + token
    total = after  # over the ids at place len(kept)
    span = slice(place * vocabulary, (place + 1) * vocabulary)
    for level in model[len(kept) + 1 :]:
        total = (total[:, None] * level[span]).reshape(-1)
        span = slice(span.start * vocabulary, span.stop * vocabulary)
    whole = torch.zeros(vocabulary ** len(model), dtype=torch.float64)
    whole[span] = total
    return whole


def sampled_error(rule: str, model: Tree, draft: Tree) -> tuple[float, float]:
    """Largest error over all sequences when drafts are drawn from ``draft``, and the mean number kept."""
    k, vocabulary = len(model) - 1, model[0].shape[1]
    drafts = all_drafts(vocabulary, k)
    table, mean = outcomes(rule, model, drafts, rows_along(draft, drafts))
    weight = sequence_probabilities(draft)
    error = (weight[:, None] * table).sum(0) - sequence_probabilities(model)
    return float(error.abs().max()), float((weight * mean).sum())


def one_hot_error(rule: str, model: Tree) -> tuple[float, Tensor]:
    """Largest error over all sequences and all drafts, each given as the only one possible; [B] kept."""
    k, vocabulary = len(model) - 1, model[0].shape[1]
    table, mean = outcomes(rule, model, all_drafts(vocabulary, k), None)
    return float((table - sequence_probabilities(model)).abs().max()), mean
