"""Few rows an expert: numbers of any size, rows that do not depend on their company, and what is none."""

import pytest
import torch
from k3compile.kernels import moe_native
from k3compile.kernels.moe import experts_unfinalized
from k3compile.kernels.mxfp4 import pack
from k3compile.kernels.native import ISAS, build
from lanes import thinned

RANK = list(ISAS)
RUNNABLE = RANK[RANK.index(build.best_isa()) :]  # what this CPU can run: its best, and all below
BETAS, SMOOTH = (4.0, 25.0), (0.0, 0.0)  # with a cap, the error of large numbers is that of one near zero
LATENT, INNER = 288, 96


@pytest.fixture(params=thinned(RUNNABLE, 1))
def isa(request):
    if reason := build.unavailable("moe", request.param):
        pytest.skip(reason)
    return request.param


def one_expert(latent, inner):
    source = torch.Generator().manual_seed(0)
    shapes = (1, inner, latent), (1, inner, latent), (1, latent, inner)
    parts = [pack(torch.randn(s, generator=source, dtype=torch.float64) * s[-1] ** -0.5) for s in shapes]
    return tuple(tensor for part in parts for tensor in part)


def error(got, want):
    """Root mean square of the difference, as a share of that of what is wanted."""
    return ((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt()).item()


def run(z, weights, isa, betas=BETAS):
    return moe_native.run(z, torch.zeros(len(z), 1, dtype=torch.int64), weights, *betas, isa=isa)[0]


def meaning(z, weights, betas=BETAS):
    return experts_unfinalized.meaning(z, torch.zeros(len(z), 1, dtype=torch.int64), *weights, *betas)[0]


def rows_of_all_sizes(name, tokens=8):
    z = torch.randn(tokens, LATENT)
    if name == "an outlier in each group":
        z[:, 5::32] *= 3000
    elif name == "each column its own size":
        z *= 2.0 ** torch.randint(-40, 12, (LATENT,))
    elif name == "each group its own size":
        z *= (2.0 ** torch.randint(-90, 3, (LATENT // 32,))).repeat_interleave(32)
    elif name == "1e-30 beside 1e+3":
        z *= torch.where(torch.arange(LATENT) % 2 == 0, 1e-30, 1e3)
    elif name == "1e-30 beside 1e+12, which has no digits":
        z *= torch.where(torch.arange(LATENT) % 2 == 0, 1e-30, 1e12)
    elif name == "a group of dust":
        z[:, 64:96] *= 1e-35
    elif name == "beyond what has digits":
        z *= 4e4
    elif name == "zeros":
        z[:, 32:128] = 0.0
        z[:, 130:160] = -0.0
        z[1] = 0.0
    elif name == "just below a power of two":
        z = torch.nextafter(torch.full_like(z, 2.0), torch.tensor(0.0)) * z.sign()
    elif name == "at the limits of the digits":
        z = z.sign() * torch.tensor([127.0, 126.0, 63.5, 127.5]).repeat(LATENT // 4) * 2.0**-6
    return z


SIZES = [
    "an outlier in each group",
    "each column its own size",
    "each group its own size",
    "1e-30 beside 1e+3",
    "1e-30 beside 1e+12, which has no digits",
    "a group of dust",
    "beyond what has digits",
    "zeros",
    "just below a power of two",
    "at the limits of the digits",
]


@pytest.mark.parametrize("name", SIZES)
def test_numbers_of_any_size_are_as_close_to_float64_as_the_meaning(isa, name):
    z, weights = rows_of_all_sizes(name), one_expert(LATENT, INNER)
    want = meaning(z.double(), weights, SMOOTH)
    assert error(run(z, weights, isa, SMOOTH), want) <= 1.1 * error(meaning(z, weights, SMOOTH), want)


@pytest.mark.parametrize("latent", [32, 64, 96, 128, 160, 1024, 1056, 1184])
def test_each_column_meets_its_own_weight(isa, latent):
    weights = one_expert(latent, 32)
    z = torch.zeros(8, latent)
    for first in range(0, latent, 8 * 5):
        columns = torch.arange(first, first + 8) % latent
        z.zero_()[torch.arange(8), columns] = 2.0
        torch.testing.assert_close(run(z, weights, isa), meaning(z, weights), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("tokens", [2, 3, 4, 5, 6, 7, 8])
def test_a_row_does_not_depend_on_the_others_of_its_expert(isa, tokens):
    weights, z = one_expert(LATENT, INNER), torch.randn(tokens, LATENT)
    z[1] *= 1e6  # a row without digits among those with
    together = run(z, weights, isa)
    for m in range(tokens):
        assert torch.equal(together[m], run(z[m : m + 1], weights, isa)[0]), m


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("column", [0, 31, 32, 127, 287])
def test_what_is_no_number_stays_none_and_harms_no_other(isa, bad, column):
    weights, z = one_expert(LATENT, INNER), torch.randn(5, LATENT)
    clean = run(z, weights, isa)
    z[2, column] = bad
    rows, want = run(z, weights, isa), meaning(z, weights)
    torch.testing.assert_close(rows, want, rtol=1e-5, atol=1e-6, equal_nan=True)
    others = [0, 1, 3, 4]
    assert torch.equal(rows[others], clean[others])


def test_infinite_inner_rows_are_as_the_meaning_has_them(isa):
    weights, z = one_expert(LATENT, INNER), torch.randn(3, LATENT)
    z[1] *= 1e25  # the products of gate and up overflow
    rows, want = run(z, weights, isa, (0.0, 0.0)), meaning(z, weights, (0.0, 0.0))
    assert not want[1].isfinite().all()
    assert torch.equal(rows.isfinite(), want.isfinite())


def test_numbers_below_the_normal_ones_are_kept(isa):
    latent = 64
    weights = one_expert(latent, 32)
    large = [w.clone() for w in weights]
    large[1].fill_(127 + 126), large[3].fill_(127 + 126)
    z = torch.randn(3, latent) * 2e-38
    z[1, 32:] = 0.0
    assert error(run(z, large, isa), meaning(z.double(), large)) < 1e-6
