"""Norms against torch's own and against the rounding the released model has."""

import k3compile.kernels  # noqa: F401  registers the ops
import pytest
import torch
from torch.nn import functional as F

k3 = torch.ops.k3


def test_rms_norm_is_torchs_in_float64():
    x, w = torch.randn(5, 24, dtype=torch.float64), torch.randn(24, dtype=torch.float64)
    torch.testing.assert_close(k3.rms_norm(x, w, 1e-5), F.rms_norm(x, (24,), w, 1e-5))


def test_the_norm_is_rounded_before_the_gain():
    x, w = torch.randn(64, 96).bfloat16(), torch.randn(96).bfloat16()
    wide = x.float()
    unit = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).bfloat16()
    assert torch.equal(k3.rms_norm(x, w, 1e-5), unit * w)
    late = (F.rms_norm(wide, (96,), None, 1e-5) * w.float()).bfloat16()
    assert not torch.equal(k3.rms_norm(x, w, 1e-5), late), "the sample does not tell the two roundings apart"


def test_l2_norm_has_its_epsilon_inside_the_root():
    x = torch.tensor([[3e-3, 4e-3]], dtype=torch.float64)
    want = x / (x.square().sum() + 1e-6).sqrt() * 0.5
    torch.testing.assert_close(k3.l2_norm(x, 0.5), want)
    assert k3.l2_norm(torch.zeros(1, 8), 1.0).tolist() == [[0.0] * 8]


def test_a_gated_norm_norms_first_and_gates_with_a_sigmoid():
    x, gate, w = (torch.randn(3, 2, 16, dtype=torch.float64) for _ in range(3))
    want = F.rms_norm(x, (16,), w[0, 0], 1e-5) * torch.sigmoid(gate)
    torch.testing.assert_close(k3.gated_rms_norm(x, gate, w[0, 0], 1e-5), want)


@pytest.mark.parametrize("stride", ["slice", "transpose", "expand"])
def test_strides_do_not_matter(stride):
    whole = torch.randn(6, 4, 32, dtype=torch.float64)
    x = {
        "slice": whole[..., 8:24],
        "transpose": whole[..., :4].transpose(1, 2).contiguous().transpose(1, 2),
        "expand": whole[:1, :, :16].expand(6, 4, 16),
    }[stride]
    w, dense = torch.randn(x.shape[-1], dtype=torch.float64), x.contiguous()
    for fn in (lambda x: k3.rms_norm(x, w, 1e-5), lambda x: k3.l2_norm(x, 0.25)):
        torch.testing.assert_close(fn(x), fn(dense), rtol=0, atol=1e-14)
    got, want = k3.gated_rms_norm(x, x, w, 1e-5), k3.gated_rms_norm(dense, dense, w, 1e-5)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-14)
