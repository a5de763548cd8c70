"""Lesson 6: what changed between two graphs, and nothing where they only look different."""

import torch

import k3compile
from k3compile.graphdiff.diff import diff
from k3compile.graphdiff.render_text import text


def model(x, w):
    return torch.relu(x @ w) - x


def renamed(weights_last, weights):
    product = weights_last @ weights
    return torch.relu(product) - weights_last


def swapped(x, w):
    return x - torch.relu(x @ w)


x, w = torch.randn(4, 8), torch.randn(8, 8)
final = [k3compile.capture(f, x, w)[0].stage("final").snapshot for f in (model, renamed, swapped)]
before, same, other = final

print("other names:", "no difference" if diff(before, same).same else "a difference")
print("operands swapped:")
print(text(diff(before, other)))
