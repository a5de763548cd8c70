"""MXFP4 experts with MXFP8 rows, interpreted: the meaning of rounded rows, within its own tolerance."""

import pytest
import torch
from interpreted import double, interpreted, meaning_of
from k3compile.kernels import OPS
from k3compile.kernels.jit_triton import recording
from k3compile.kernels.moe_mxfp8_triton import objection
from k3compile.kernels.mxfp4 import pack
from k3compile.kernels.samples import Draw

OP = OPS["experts_unfinalized"]
IMPLEMENTATION = OP.implementations["triton_mxfp8"]


def computed(args):
    module = "k3compile.kernels.moe_mxfp8_triton"
    return interpreted(module, "experts_mxfp8", *args)[0]


def rounded(x):
    """x as MXFP8 has it: groups of 32 over the smallest power of two that leaves none above 448."""
    groups = x.double().unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1, keepdim=True)
    unit = torch.where(largest > 0, torch.exp2(torch.ceil(torch.log2(largest / 448))), 1.0)
    return ((groups / unit).float().to(torch.float8_e4m3fn).double() * unit).flatten(-2)


def call(dtype, seed=0, tokens=20, latent=128, inner=96, experts=3):
    draw = Draw(dtype, seed=seed)
    gate, up = (pack(draw.exact(experts, inner, latent) * latent**-0.5) for _ in range(2))
    down = pack(draw.exact(experts, latent, inner) * inner**-0.5)
    ids = draw.below(experts + 1, tokens, 2) - 1
    return draw.normal(tokens, latent), ids, *gate, *up, *down, 4.0, 25.0


def test_rows_are_quantised_as_the_format_says():
    z = torch.randn(5, 96, dtype=torch.float64).float() * 10.0 ** torch.arange(-20, 20, 8).view(5, 1)
    z[0, :32] = 0.0
    z[1, 40] = 449.0 / 448.0 * z[1, 32:64].abs().max()
    wide = torch.full((5, 224), torch.nan)
    wide[:, 64:160] = z
    values, scale = torch.empty(5, 96, dtype=torch.uint8), torch.empty(5, 3, dtype=torch.uint8)
    module = "k3compile.kernels.moe_mxfp8_triton"
    _, (_, values, scale) = interpreted(module, "quantise", wide[:, 64:160], values, scale)
    unit = torch.exp2(scale.double() - 127).repeat_interleave(32, 1)
    assert torch.equal(values.view(torch.float8_e4m3fn).double() * unit, rounded(z))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_samples_are_within_the_tolerance_it_declares(dtype):
    for args in OP.each_sample(dtype):
        (rows, idx), ((want, places), _) = computed(args), meaning_of(OP.name, args)
        assert torch.equal(idx, places)
        if rows.numel():
            bound = IMPLEMENTATION.tolerance.of(dtype) * want.abs().max()
            assert (rows.double() - want).abs().max() <= bound


def test_it_is_the_meaning_of_rounded_rows_and_rounded_inner_activations():
    """But for values next to the middle between two codes, which sums in another order push over."""
    args = list(call(torch.float32))
    rows, idx = computed(args)
    args[0] = rounded(args[0])
    exact = double(args)
    w1, w3, w2 = (unpacked(*exact[i : i + 2]) for i in (2, 4, 6))
    for token, of_token in enumerate(args[1].tolist()):
        for slot, e in enumerate(of_token):
            if e >= 0:
                gate, up = w1[e] @ exact[0][token], w3[e] @ exact[0][token]
                inner = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
                want = w2[e] @ rounded(inner)
                error = rows[idx[token, slot]].double() - want
                assert error.norm() <= 2e-3 * want.norm()


def unpacked(codes, scale):
    from k3compile.kernels.mxfp4 import unpack

    return unpack(codes, scale, torch.float64)


def test_it_is_coarser_than_the_op_and_so_only_taken_where_it_is_named():
    args = call(torch.bfloat16)
    (rows, _), ((want, _), _) = computed(args), meaning_of(OP.name, args)
    error = (rows.double() - want).abs().max() / want.abs().max()
    assert error > OP.tolerance.of(torch.bfloat16)
    assert IMPLEMENTATION.asked_for
    assert not OP.implementations["triton"].asked_for


def test_parts_without_block_scaled_instructions_are_refused(monkeypatch):
    from k3compile.kernels import moe_triton

    args = call(torch.bfloat16)
    assert objection(*args) == "cpu tensors"
    monkeypatch.setattr(moe_triton, "no_gpu", lambda *tensors: None)
    for target, able in {"sm_90": False, "sm_100": True, "gfx950": True}.items():
        with recording(target):
            assert (objection(*args) is None) == able
    assert "without block-scaled" in objection(*args)
