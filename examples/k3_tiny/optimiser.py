"""Muon for matrices, AdamW for the rest.

matrix    momentum -> orthogonalised by five Newton-Schulz steps -> a step of one root mean square
the rest  embeddings, head, router, convolutions, gains, biases
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

ADAM = (
    "embed_tokens",
    "lm_head.weight",
    "conv_weight",
    "ffn.gate",
    "markov_w1",
    "markov_w2",
    "confidence_weight",
)
SCHULZ = (3.4445, -4.7750, 2.0315)
MOMENTUM, BETAS, EPS, DECAY = 0.95, (0.9, 0.98), 1e-8, 0.05


class Optimiser:
    """Steps ``master`` in place. state: everything that a later run needs to go on."""

    def __init__(self, master: dict[str, Tensor]) -> None:
        self.master = master
        self.count = 0
        self.first = {name: torch.zeros_like(value) for name, value in master.items()}
        self.second = {
            name: torch.zeros_like(value) for name, value in master.items() if not is_matrix(name, value)
        }
        self.groups: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
        for name, value in master.items():
            if is_matrix(name, value):
                self.groups[matrices(name, value).shape[1:]].append(name)

    def state(self) -> dict:
        return {"count": self.count, "first": self.first, "second": self.second}

    def load(self, state: dict) -> None:
        self.count = state["count"]
        for mine, kept in ((self.first, state["first"]), (self.second, state["second"])):
            for name, value in mine.items():
                value.copy_(kept[name])

    def step(self, gradients: dict[str, Tensor], rate: float, adam_rate: float) -> None:
        """One step. rate: of a matrix, in root mean squares; adam_rate: of everything else."""
        self.count += 1
        for names in self.groups.values():
            pushes = []
            for name in names:
                moment = self.first[name].mul_(MOMENTUM).add_(gradients[name])
                pushes.append(matrices(name, gradients[name].add(moment, alpha=MOMENTUM)))
            steps = orthogonal(torch.cat(pushes)).float()
            steps *= 0.2 * max(steps.shape[1:]) ** 0.5
            for name, step in zip(names, steps.split([len(push) for push in pushes])):
                value = self.master[name]
                value.mul_(1 - rate * DECAY).sub_(step.reshape(value.shape), alpha=rate)
        self.step_rest(gradients, adam_rate)

    def step_rest(self, gradients: dict[str, Tensor], rate: float) -> None:
        for name, second in self.second.items():
            if (gradient := gradients.get(name)) is None:
                continue
            first = self.first[name].lerp_(gradient, 1 - BETAS[0])
            second.lerp_(gradient.square(), 1 - BETAS[1])
            rise = first / (1 - BETAS[0] ** self.count)
            size = (second / (1 - BETAS[1] ** self.count)).sqrt() + EPS
            self.master[name].addcdiv_(rise, size, value=-rate)


def is_matrix(name: str, value: Tensor) -> bool:
    return value.dim() > 1 and not name.endswith(ADAM)


def matrices(name: str, value: Tensor) -> Tensor:
    """As a stack [N, out, in] of matrices that are alike: q, k and v apart, experts apart."""
    if "qkv_proj" in name:
        return value.view(3, -1, value.shape[1])
    return value if value.dim() == 3 else value.unsqueeze(0)


def orthogonal(stack: Tensor) -> Tensor:
    """[N, out, in] -> matrices with the same directions and singular values near 1, bfloat16."""
    tall = stack.shape[1] > stack.shape[2]
    x = stack.to(torch.bfloat16)
    x = x.mT if tall else x
    x = x / (x.float().norm(dim=(1, 2), keepdim=True).to(x.dtype) + 1e-7)
    a, b, c = SCHULZ
    for _ in range(5):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
