"""SiTU against the golden values of the model's description."""

import k3compile.kernels  # noqa: F401  registers the ops
import torch
from k3compile.kernels.situ import situ_wide
from torch.nn import functional as F

k3 = torch.ops.k3


def test_golden_values():
    gate = torch.tensor([1.0, -2.0, 10.0, 0.5], dtype=torch.float64)
    up = torch.tensor([1.0, 3.0, 50.0, -7.0], dtype=torch.float64)
    want = [0.7158178280748, -0.6578738185454, 95.1080215340, -2.1124132154957]
    got = k3.situ(gate, up, 4.0, 25.0)
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-10)


def test_the_output_is_capped_and_the_sigmoid_is_not():
    got = k3.situ(torch.tensor([1e4, -1e4]), torch.tensor([1e4, 1e4]), 4.0, 25.0)
    assert got.tolist() == [100.0, 0.0]


def test_beta_zero_is_the_swiglu_of_kimi_linear():
    gate, up = torch.randn(2, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(k3.situ(gate, up, 0.0, 0.0), F.silu(gate) * up)


def test_bfloat16_rounds_once():
    gate, up = torch.randn(2, 50, 8).bfloat16()
    assert torch.equal(
        k3.situ(gate, up, 4.0, 25.0), situ_wide(gate.float(), up.float(), 4.0, 25.0).bfloat16()
    )
