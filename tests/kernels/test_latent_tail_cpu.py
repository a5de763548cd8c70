"""The tail on a CPU: the meaning's numbers in fewer calls, holes skipped, nothing beside its rows touched."""

import pytest
import torch
from k3compile.kernels import latent_tail_cpu as latent_tail_cpu_module
from k3compile.kernels.latent_tail import finalized, latent_tail, normed
from k3compile.kernels.latent_tail_cpu import latent_tail_cpu, objection
from k3compile.kernels.linear_bf16 import linear_bf16
from k3compile.kernels.native import ISAS, build, written_down
from lanes import thinned
from latent_tails import EPS, make_args
from threaded_ranks import on_threads

from k3compile.recording import Recording

RANK = list(ISAS)
RUNNABLE = RANK[RANK.index(build.best_isa()) :]  # what this CPU can run: its best, and all below


def arguments(dtype, tokens=5):
    return (*make_args(dtype, tokens, top_k=3), EPS, "")


@pytest.mark.parametrize("tokens", [0, 1, 2, 33])
@pytest.mark.parametrize("resident", [torch.float32, torch.bfloat16], ids=str)
def test_it_agrees_with_the_meaning(tokens, resident):
    rows, w, idx, norm_w, up_w, *rest = arguments(torch.float32, tokens)
    args = (rows, w, idx, norm_w, up_w.to(resident), *rest)
    torch.testing.assert_close(latent_tail_cpu(*args), latent_tail.meaning(*args), rtol=1e-5, atol=1e-5)


def test_a_bfloat16_matrix_is_read_as_it_is_where_something_can(monkeypatch):
    rows, w, idx, norm_w, up_w, *rest = arguments(torch.float32)
    args, read = (rows, w, idx, norm_w, up_w.bfloat16(), *rest), []

    def watched(x, w):
        read.append(w.dtype)
        return linear_bf16.meaning(x, w)

    monkeypatch.setattr(latent_tail_cpu_module, "linear_native", watched)
    monkeypatch.setattr(latent_tail_cpu_module, "unavailable", lambda name: None)
    latent_tail_cpu(*args)
    assert read == [torch.bfloat16]
    monkeypatch.setattr(latent_tail_cpu_module, "unavailable", lambda name: "no compiler")
    latent_tail_cpu(*args)
    assert read == [torch.bfloat16]


def with_holes():
    rows, w, idx, *rest = arguments(torch.float32)
    idx[0, 0], rows[0], w[0, 0] = -1, torch.nan, torch.nan
    idx[idx == 0] = 1
    return rows, w, idx, *rest


def test_holes_are_skipped_whatever_they_hold():
    args = with_holes()
    torch.testing.assert_close(latent_tail_cpu(*args), latent_tail.meaning(*args), rtol=1e-5, atol=1e-5)


def test_without_a_compiler_holes_are_left_to_the_meaning(monkeypatch):
    monkeypatch.setattr(latent_tail_cpu_module, "unavailable", lambda name: "no compiler")
    args = with_holes()
    assert torch.equal(latent_tail_cpu(*args), latent_tail.meaning(*args))
    args[2][args[2] < 0] = 2
    args[1].nan_to_num_()
    torch.testing.assert_close(latent_tail_cpu(*args), latent_tail.meaning(*args), rtol=1e-5, atol=1e-5)


@pytest.fixture(params=thinned(RUNNABLE, 1))
def isa(request):
    if reason := build.unavailable("latent_tail", request.param):
        pytest.skip(reason)
    return request.param


def reference(rows, w, idx, norm_w):
    return normed(finalized(rows, w, idx), norm_w, EPS)


def error(got, want):
    return ((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt()).item()


@pytest.mark.parametrize("latent", [3, 24, 512, 515])
def test_sums_and_norms_are_as_close_to_float64_as_the_meaning(isa, latent):
    rows, w, norm_w = torch.randn(70, latent), torch.rand(40, 8), 1 + torch.randn(latent) / 9
    idx = torch.randint(-1, 70, (40, 8), dtype=torch.int32)
    want = reference(rows.double(), w.double(), idx, norm_w.double())
    got = latent_tail_cpu_module.units(rows, w, idx, norm_w, EPS, isa)
    few = 1 + 3 / want.numel() ** 0.5  # the rounding errors of a few numbers scatter by more
    assert error(got, want) <= 1.1 * few * error(reference(rows, w, idx, norm_w), want)
    assert torch.equal(latent_tail_cpu_module.units(rows, w, idx.long(), norm_w, EPS, isa), got)


def test_nothing_beside_the_arguments_is_read_or_written(isa, monkeypatch):
    rows, w, norm_w, idx = torch.randn(9, 20), torch.rand(4, 3), torch.rand(20), torch.randint(0, 9, (4, 3))
    want = latent_tail_cpu_module.units(rows, w, idx, norm_w, EPS, isa)
    wide, many = torch.full((9, 60), torch.nan), torch.full((4, 9), torch.nan)
    far = torch.full((4, 9), 1 << 40)
    wide[:, 17:37], many[:, 2:5], far[:, 3:6] = rows, w, idx
    room = torch.full((4 * 20 + 128,), 77.0)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", lambda t, *shape: room[64:-64].view(shape))
        got = latent_tail_cpu_module.units(wide[:, 17:37], many[:, 2:5], far[:, 3:6], norm_w, EPS, isa)
    assert torch.equal(got, want)
    assert (room[:64] == 77).all()
    assert (room[-64:] == 77).all()


@pytest.mark.parametrize("tokens", [0, 1, 2, 700])
def test_the_shared_part_is_added_as_torch_adds_it(isa, tokens):
    up, wide = torch.randn(tokens, 37), torch.randn(tokens, 90)
    for shared in (wide[:, 5:42], wide[:, 1:75:2]):
        room = torch.full((tokens * 37 + 64,), 77.0)
        room[32:-32] = up.flatten()
        got = latent_tail_cpu_module.joined(room[32:-32].view(tokens, 37), shared, isa)
        assert torch.equal(got, up + shared)
        assert (room[:32] == 77).all()
        assert (room[-32:] == 77).all()


def test_with_a_bfloat16_matrix_no_op_of_torch_computes():
    rows, w, idx, norm_w, up_w, *rest = arguments(torch.float32)
    up_w = up_w.bfloat16()
    if build.unavailable("latent_tail") or build.unavailable("linear"):
        pytest.skip("nothing can be compiled here")
    recording = Recording(())
    with written_down(recording.calls, recording.kept), recording:
        torch.ops.k3.latent_tail.cpu(rows, w, idx, norm_w, up_w, *rest)
    names = [function.__name__ for function, _ in recording.calls]
    assert names == ["k3_latent_units", "k3_linear_bf16", "k3_latent_join"]


def test_the_shared_part_is_not_written():
    args = arguments(torch.float32)
    before = args[5].clone()
    got = latent_tail_cpu(*args)
    assert torch.equal(args[5], before)
    assert got.data_ptr() != args[5].data_ptr()


def test_a_row_does_not_depend_on_the_others_beyond_rounding():
    rows, w, idx, norm_w, up_w, shared, *rest = arguments(torch.float32, tokens=33)
    whole = latent_tail_cpu(rows, w, idx, norm_w, up_w, shared, *rest)
    alone = latent_tail_cpu(rows, w[7:8], idx[7:8], norm_w, up_w, shared[7:8], *rest)
    torch.testing.assert_close(whole[7:8], alone, rtol=1e-5, atol=1e-5)


def test_other_dtypes_are_computed_by_the_meaning():
    assert objection(*arguments(torch.float32)) is None
    assert "not float32" in objection(*arguments(torch.float64)), "float64 is compared bit for bit"
    assert "not float32" in objection(*arguments(torch.bfloat16))
    assert objection(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments(torch.float32)))


def test_several_ranks_are_for_the_tiers():
    def work(rank):
        *args, _ = arguments(torch.float32)
        return objection(*args, torch.distributed.group.WORLD.group_name)

    assert on_threads(2, work) == ["summed over ranks, by tiers"] * 2
    assert on_threads(1, work) == [None]
