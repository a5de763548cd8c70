"""A product with a bfloat16 matrix sums what the matrix holds, in the activations' accumulation dtype."""

import pytest
import torch
from k3compile.kernels.linear_bf16 import linear_bf16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_the_product_with_the_widened_matrix(dtype):
    x, w = torch.randn(5, 24, dtype=dtype), torch.randn(7, 24).bfloat16()
    assert torch.equal(linear_bf16(x, w), torch.nn.functional.linear(x, w.to(dtype)))


def test_bfloat16_activations_are_summed_in_float32_and_rounded_once():
    x = torch.ones(1, 513).bfloat16()
    w = torch.full((1, 513), 1.0).bfloat16()
    w[0, 0] = 2.0**-9  # 512 + 2^-9 rounds down at the end; a bfloat16 sum would stop at 256
    assert linear_bf16(x, w).item() == 512.0
    assert linear_bf16(x, w).dtype == torch.bfloat16


def test_the_matrix_is_not_rounded_again_in_a_float64_model():
    x, w = torch.randn(3, 16, dtype=torch.float64), torch.randn(4, 16).bfloat16()
    assert torch.equal(linear_bf16(x, w), x @ w.double().t())
