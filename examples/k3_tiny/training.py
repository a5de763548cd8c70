"""One training step, the schedule, and what the model gets right."""

from __future__ import annotations

from typing import NamedTuple

import torch
from k3compile.runtime.config import K3Config
from k3compile.runtime.tokenizer import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from k3compile.bench.recall_tasks import TASKS, generate

from .forward import Pieces, forward
from .optimiser import Optimiser
from .rows import Rows
from .weights import seen

CLIP = 1.0
BALANCE = 0.002  # how fast a router's bias follows its load


def loss_of(
    config: K3Config, weights: dict[str, Tensor], rows: Rows, pieces: Pieces | None = None
) -> tuple[Tensor, Tensor, dict]:
    """Sum of the losses of the answers' tokens, whether each was the likeliest [n], loads of the routers."""
    result = forward(config, weights, rows.tokens, pieces=pieces)
    hidden, targets = result.hidden[rows.learned], rows.targets[rows.learned]
    logits = F.linear(hidden, weights["lm_head.weight"]).float()
    return F.cross_entropy(logits, targets, reduction="sum"), logits.argmax(1) == targets, result.loads


class Report(NamedTuple):
    loss: float  # of a token of an answer
    right: float  # share of them that were the likeliest
    norm: float  # of the gradient


def step(
    config: K3Config,
    master: dict[str, Tensor],
    optimiser: Optimiser,
    batches: list[Rows],
    rate: float,
    adam_rate: float,
    pieces: Pieces | None = None,
    balance: float = BALANCE,
) -> Report:
    """One step on several batches together."""
    weights = seen(master)
    total, right, count = 0.0, 0, sum(int(rows.learned.sum()) for rows in batches)
    for rows in batches:
        loss, hits, loads = loss_of(config, weights, rows, pieces)
        (loss / count).backward()
        total, right = total + loss.item(), right + int(hits.sum())
        for layer, load in loads.items():
            master[f"layers.{layer}.ffn.e_score_correction_bias"] -= balance * (load - load.mean()).sign()
    gradients = {name: w.grad.float() for name, w in weights.items() if w.grad is not None}
    norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt().item()
    if norm > CLIP:
        for gradient in gradients.values():
            gradient *= CLIP / norm
    optimiser.step(gradients, rate, adam_rate)
    return Report(total / count, right / count, norm)


def shares(
    config: K3Config, master: dict[str, Tensor], tokenizer: Tokenizer, count: int, seed: int
) -> dict[str, float]:
    """Task -> share of problems whose every token of the answer is the likeliest one, given those before."""
    weights, out = seen(master), {}
    for task in TASKS:
        pairs = [(p.prompt_ids(tokenizer), p.answer_ids(tokenizer)) for p in generate(task, count, seed)]
        pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
        right = 0
        for at in range(0, count, 8):
            right += all_right(config, weights, pairs[at : at + 8])
        out[task] = right / count
    return out


@torch.no_grad()
def all_right(config: K3Config, weights: dict[str, Tensor], pairs: list[tuple[list[int], list[int]]]) -> int:
    """How many of these (prompt, answer) are right."""
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    tokens = torch.zeros(len(pairs), -(-longest // 16) * 16, dtype=torch.int64)
    for row, (prompt, answer) in zip(tokens, pairs):
        row[: len(prompt) + len(answer)] = torch.tensor(prompt + answer)
    likeliest = F.linear(forward(config, weights, tokens).hidden, weights["lm_head.weight"]).argmax(-1)
    return sum(
        row[len(prompt) - 1 : len(prompt) + len(answer) - 1].tolist() == answer
        for row, (prompt, answer) in zip(likeliest, pairs)
    )
