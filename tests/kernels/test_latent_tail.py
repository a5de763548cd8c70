"""The tail of a latent mixture of experts against a loop over its definition, holes and NaN included."""

import pytest
import torch
from k3compile.kernels import acc
from k3compile.kernels.latent_tail import latent_tail
from k3compile.kernels.samples import Draw

k3 = torch.ops.k3
NAN = float("nan")


def arguments(dtype, tokens=5, top_k=3, rows=12, latent=24, width=16, seed=0):
    draw = Draw(dtype, seed)
    idx = torch.stack([torch.randperm(rows, generator=draw.source)[:top_k] for _ in range(tokens)])
    weights = draw.fraction(tokens, top_k)
    norm_w, up_w = draw.normal(latent), draw.normal(width, latent)
    shared = draw.normal(tokens, width)
    return draw.normal(rows, latent), weights, idx.to(torch.int32), norm_w, up_w, shared, 1e-5, ""


def by_definition(rows, w, idx, norm_w, up_w, shared, eps, group):
    """Row by row in float64."""
    rows, w, norm_w, up_w = (t.double() for t in (rows, w, norm_w, up_w))
    out = shared.double().clone()
    for t in range(idx.shape[0]):
        y = rows.new_zeros(rows.shape[1])
        for j in range(idx.shape[1]):
            if idx[t, j] >= 0:
                y += w[t, j] * rows[idx[t, j]]
        out[t] += up_w @ (y / (y.square().mean() + eps).sqrt() * norm_w)
    return out


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_it_is_its_definition(tokens, top_k):
    args = arguments(torch.float64, tokens, top_k)
    args[2][-1, -1] = -1
    torch.testing.assert_close(k3.latent_tail(*args), by_definition(*args), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", [latent_tail.meaning, latent_tail.open_form], ids=["meaning", "opened"])
def test_a_hole_reads_neither_its_row_nor_its_weight(form):
    rows, w, idx, *rest = arguments(torch.float32)
    idx[idx == 0] = 1
    want = form(rows, torch.where(idx == 1, 0.0, w), idx, *rest)
    holes = idx == 1
    w[holes] = NAN
    rows[0], rows[1] = NAN, NAN  # row 0 is what a careless clamp reads
    torch.testing.assert_close(form(rows, w, idx.masked_fill(holes, -1), *rest), want)


def test_all_holes_leave_the_shared_part():
    rows, w, idx, *_, shared, eps, group = arguments(torch.float32)
    norm_w, up_w = torch.ones(24), torch.ones(16, 24)
    got = k3.latent_tail(rows[:0], w, torch.full_like(idx, -1), norm_w, up_w, shared, eps, group)
    assert torch.equal(got, shared)
    assert got.data_ptr() != shared.data_ptr()


def test_in_bfloat16_it_rounds_once():
    args = arguments(torch.bfloat16, tokens=64, latent=96, width=64)
    want = by_definition(*args)
    error = (k3.latent_tail(*args).double() - want).abs()
    assert (error <= 2.0**-8 * 1.01 * want.abs() + 1e-5).all(), "more than half a unit in the last place"


def test_float32_activations_with_bfloat16_weights_are_exact_products():
    rows, w, idx, norm_w, up_w, *rest = arguments(torch.float32)
    want = k3.latent_tail(rows, w, idx, norm_w, up_w.bfloat16().float(), *rest)
    assert torch.equal(k3.latent_tail(rows, w, idx, norm_w, up_w.bfloat16(), *rest), want)


def test_a_group_of_one_gives_the_same(lone_group):
    args = arguments(torch.float32)
    assert torch.equal(k3.latent_tail(*args[:-1], lone_group), k3.latent_tail(*args))


@pytest.fixture
def lone_group():
    dist = torch.distributed
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD.group_name


def test_weights_are_summed_in_acc():
    assert arguments(torch.bfloat16)[1].dtype == acc(torch.bfloat16) == torch.float32
