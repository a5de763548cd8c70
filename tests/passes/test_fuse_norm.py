"""A norm takes over the add and the mix before it; the result is the same bit for bit."""

import k3compile.kernels  # noqa: F401  (registers the ops)
import pytest
import torch
from compiled import check
from k3compile.passes.fuse_norm import FUSE_NORM
from k3compile.runtime.config import K3Config
from k3compile.runtime.presets import PRESETS, config_json

from k3compile.kinds import compile_kinds
from k3compile.options import CompileOptions

k3 = torch.ops.k3
T, D, N = 5, 8, 3
P, A = torch.randn(T, D), torch.randn(T, D)
BLOCKS = torch.randn(N, T, D)
GAIN, PROJ, W = torch.randn(D), torch.randn(D), torch.randn(D)


def fused(fn, *args):
    compiled = check(fn, args, passes=(FUSE_NORM,), verify="static")
    return compiled, compiled.remarks(name="fuse_norm")


def between(p, a, blocks, gain, proj, w):
    s = p + a
    return k3.rms_norm(k3.attn_res_mix(s, blocks, gain, proj, 1e-5), w, 1e-6) + s


def test_the_norm_between_attention_and_feed_forward_is_one_op():
    compiled, remarks = fused(between, P, A, BLOCKS, GAIN, PROJ, W)
    applied = [r for r in remarks if r.kind == "applied"]
    assert [r.reason for r in applied] == ["add_mix_norm"]
    assert "k3.add_mix_rms_norm.default" in compiled.targets()
    assert "k3.rms_norm.default" not in compiled.targets()


def test_what_it_saves_is_what_passed_through_memory():
    _, remarks = fused(between, P, A, BLOCKS, GAIN, PROJ, W)
    (applied,) = [r for r in remarks if r.kind == "applied"]
    row = T * D * 4
    # the sum is not read by a mix of its own, the mixture is neither written nor read
    assert applied.expected == {"launches": -2, "bytes": str(-3 * row), "allocations": -1}


def test_the_mix_at_the_start_of_a_layer_joins_its_norm():
    def function(p, blocks, gain, proj, w):
        return k3.rms_norm(k3.attn_res_mix(p, blocks, gain, proj, 1e-5), w, 1e-6)

    compiled, _ = fused(function, P, BLOCKS, GAIN, PROJ, W)
    assert compiled.targets() == ["k3.mix_rms_norm.default"]


def test_an_ordinary_residual_joins_its_norm():
    def function(x, r, w):
        s = x + r
        return s, k3.rms_norm(s, w, 1e-5)

    compiled, _ = fused(function, P, A, W)
    assert "k3.add_rms_norm.default" in compiled.targets()
    assert "aten.add.Tensor" not in compiled.targets()


@pytest.mark.parametrize(
    ("r", "reason"),
    [
        (A[:1], "the add broadcasts"),
        (A[0], "the add broadcasts"),
        (A.double(), "the operands are torch.float32 and torch.float64"),
    ],
)
def test_an_add_that_is_no_residual_is_left_alone(r, reason):
    def function(x, r, w):
        s = x + r
        return s, k3.rms_norm(s, w, 1e-5)

    compiled, remarks = fused(function, P, r, W)
    assert reason in [m.reason for m in remarks if m.kind == "missed"]
    assert "aten.add.Tensor" in compiled.targets()


def test_a_number_is_no_residual():
    _, remarks = fused(lambda x, w: k3.rms_norm(x + 1.0, w, 1e-5), P, W)
    assert "one of the operands is a number" in [r.reason for r in remarks if r.kind == "missed"]


def test_a_scaled_add_is_another_operation():
    def function(x, r, w):
        s = torch.add(x, r, alpha=2)
        return s, k3.rms_norm(s, w, 1e-5)

    compiled, remarks = fused(function, P, A, W)
    assert not [r for r in remarks if r.kind == "applied"]
    assert "aten.add.Tensor" in compiled.targets()


def test_a_mixture_somebody_else_reads_stays():
    def function(p, blocks, gain, proj, w):
        mixed = k3.attn_res_mix(p, blocks, gain, proj, 1e-5)
        return k3.rms_norm(mixed, w, 1e-6) + mixed

    _, remarks = fused(function, P, BLOCKS, GAIN, PROJ, W)
    assert "k3.attn_res_mix attn_res_mix has another user: add" in [r.reason for r in remarks]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "tiny-linear"])
def test_every_norm_of_a_layer_that_can_is_fused(name):
    config = K3Config.from_dict(config_json(PRESETS[name]))
    for kind in compile_kinds(config, CompileOptions(inner="aot_eager", verify="static")):
        assert kind.report.applied("fuse_norm") == (2 if name == "tiny" else 1), kind.name
