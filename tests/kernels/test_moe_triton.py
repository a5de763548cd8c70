"""MXFP4 experts in Triton, interpreted, in every form: against the meaning in float64 and its own error."""

import pytest
import torch
from interpreted import assert_close, check_op, check_samples, double, interpreted, meaning_of, outcome_of
from k3compile.kernels import OPS
from k3compile.kernels.jit_triton import recording
from k3compile.kernels.moe_triton import form_of, objection
from k3compile.kernels.mxfp4 import pack
from k3compile.kernels.samples import Draw

NAME = "experts_unfinalized"
FORMS = [("registers", torch.bfloat16), ("scaled", torch.bfloat16), ("float32", torch.float32)]


def as_form(form, args):
    """The implementation as it would compute on a part of that form."""
    module = "k3compile.kernels.moe_triton"
    return interpreted(module, "run", *args[:2], args[2:8], *args[8:], form)[0]


def call(dtype, ids, latent=64, inner=96, experts=5, seed=0, beta=4.0):
    draw = Draw(dtype, seed=seed)
    gate, up = (pack(draw.exact(experts, inner, latent) * latent**-0.5) for _ in range(2))
    down = pack(draw.exact(experts, latent, inner) * inner**-0.5)
    return draw.normal(len(ids), latent), ids, *gate, *up, *down, beta, 25.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_samples_come_out_as_the_meaning_says(dtype):
    check_samples(NAME, dtype)


@pytest.mark.parametrize(("form", "dtype"), FORMS, ids=lambda x: str(x))
@pytest.mark.parametrize(
    "ids",
    [
        torch.zeros(0, 2, dtype=torch.int64),
        torch.tensor([[3, 1]]),
        torch.full((20, 2), 2),
        torch.tensor([[0, -1], [-1, -1], [4, 0]]),
    ],
    ids=["nothing", "one token", "all to one expert", "holes"],
)
def test_every_form_is_as_the_meaning_says(form, dtype, ids):
    args = call(dtype, ids)
    want, _ = meaning_of(NAME, args)
    assert_close(NAME, as_form(form, args), want, dtype)


@pytest.mark.parametrize(("form", "dtype"), FORMS, ids=lambda x: str(x))
def test_errors_are_no_larger_than_the_meanings_own(form, dtype):
    ours = theirs = 0.0
    for seed in range(3):
        args = call(dtype, torch.randint(0, 2, (8, 2)), experts=2, seed=seed)
        (want, _), _ = meaning_of(NAME, args)
        rows, _ = as_form(form, args)
        own, _ = OPS[NAME].meaning(*args)
        ours += (rows.double() - want).square().sum()
        theirs += (own.double() - want).square().sum()
    assert ours.sqrt() <= 1.1 * theirs.sqrt()


def test_columns_that_fill_no_whole_tile_and_the_uncapped_activation():
    check_op(NAME, torch.float32, call(torch.float32, torch.tensor([[0, 4]] * 3), 32, 160, beta=0.0))


@pytest.mark.parametrize("form", ["registers", "scaled"])
def test_rows_next_to_those_of_a_wider_tensor_are_not_read(form):
    args = list(call(torch.bfloat16, torch.randint(0, 5, (5, 3))))
    wide = torch.full((7, 192), torch.nan, dtype=torch.bfloat16)
    wide[1:6, 64:128] = args[0]
    args[0] = wide[1:6, 64:128]
    want, _ = meaning_of(NAME, args)
    assert_close(NAME, as_form(form, args), want, torch.bfloat16)


def test_a_token_of_nan_is_noticed_by_no_other():
    args = call(torch.float32, torch.randint(0, 5, (6, 2)))
    args[0][2] = torch.nan
    (rows, idx), _ = outcome_of(NAME, args)
    assert rows[idx[2].long()].isnan().all()
    others = idx[[0, 1, 3, 4, 5]].flatten().long()
    assert rows[others].isfinite().all()


def test_scales_far_from_one_keep_every_bit():
    """In registers weights are 2^-64 of what they are, and the sums are brought back."""
    for shift in (-50, 40):
        args = list(call(torch.bfloat16, torch.tensor([[1, 3]] * 4)))
        args[3], args[7] = args[3] + shift, args[7] - shift
        args[8] = 0.0
        want, _ = meaning_of(NAME, args)
        for form in ("registers", "scaled"):
            assert_close(NAME, as_form(form, args), want, torch.bfloat16)


def test_the_form_is_the_parts():
    narrow = torch.zeros(1, 32, dtype=torch.bfloat16)
    for target, form in {"sm_90": "registers", "sm_103": "scaled", "gfx950": "scaled"}.items():
        with recording(target):
            assert form_of(narrow) == form
            assert form_of(narrow.float()) == "float32"
    assert form_of(narrow) == "registers"


def test_what_does_not_fit_is_refused(monkeypatch):
    from k3compile.kernels import moe_triton

    args = call(torch.float32, torch.tensor([[0, 1]]))
    assert objection(*args) == "cpu tensors"
    monkeypatch.setattr(moe_triton, "no_gpu", lambda *tensors: None)
    assert objection(*args) is None
    assert "float64" in objection(*double(args))
    assert objection(*args[:2], args[2].mT, *args[3:]) == "weights with gaps"
    assert "side by side" in objection(args[0], torch.zeros(1, 4, dtype=torch.int64)[:, ::2], *args[2:])
    assert "fill no whole scale" in objection(args[0][:, :48], *args[1:])
