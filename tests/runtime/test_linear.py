"""Matrices are cast where they are used, and nothing is trained."""

import torch
from k3compile.runtime.linear import Linear, Placement, RmsNorm
from k3compile.runtime.parallel.ranks import Ranks
from torch.nn import functional as F

CPU, ALONE = torch.device("cpu"), Ranks(0, 1, "")


def test_a_resident_matrix_is_cast_to_the_activations():
    linear = Linear(Placement(torch.float32, torch.bfloat16, CPU, ALONE), 6, 4)
    linear.weight.copy_(torch.randn(4, 6))
    x = torch.randn(3, 6)
    assert linear.weight.dtype == torch.bfloat16
    assert torch.equal(linear(x), F.linear(x, linear.weight.float()))


def test_accumulators_are_float32_or_wider():
    assert Placement(torch.bfloat16, torch.bfloat16, CPU, ALONE).acc == torch.float32
    assert Placement(torch.float64, torch.bfloat16, CPU, ALONE).acc == torch.float64


def test_parameters_need_no_gradient_and_live_where_they_are_put():
    norm = RmsNorm(Placement(torch.float32, torch.bfloat16, torch.device("meta"), ALONE), 8, 1e-5)
    assert norm.weight.is_meta
    assert norm.weight.dtype == torch.float32
    assert not norm.weight.requires_grad
