"""Experts in C++: the meaning's numbers on every instruction set, and nothing touched beside its rows."""

import pytest
import torch
from compiled import Compiled
from k3compile.kernels import moe_native
from k3compile.kernels.moe import experts_unfinalized
from k3compile.kernels.mxfp4 import pack
from k3compile.kernels.native import ISAS, build
from k3compile.passes.lower import Lower
from lanes import thinned

RANK = list(ISAS)
RUNNABLE = RANK[RANK.index(build.best_isa()) :]  # what this CPU can run: its best, and all below
BETAS = 4.0, 25.0


@pytest.fixture(params=thinned(RUNNABLE, 1))
def isa(request):
    if reason := build.unavailable("moe", request.param):
        pytest.skip(reason)
    return request.param


def packed_experts(experts, latent, inner):
    source = torch.Generator().manual_seed(0)
    shapes = (experts, inner, latent), (experts, inner, latent), (experts, latent, inner)
    parts = [pack(torch.randn(s, generator=source, dtype=torch.float64) * s[-1] ** -0.5) for s in shapes]
    return tuple(tensor for part in parts for tensor in part)


def error(got, want):
    """Root mean square of the difference: a largest one is chance where there are few numbers."""
    return ((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt()).item()


@pytest.mark.parametrize("beta", [BETAS, (0.0, 0.0)], ids=["capped", "silu"])
@pytest.mark.parametrize("counts", [[1], [2, 0, 3], [8, 9, 0, 1], [0, 6, 70, 257]], ids=str)
def test_it_is_at_least_as_close_to_float64_as_the_meaning(isa, counts, beta):
    ids = torch.tensor([e for e, n in enumerate(counts) for _ in range(n)]).unsqueeze(1)
    ids = ids[torch.randperm(len(ids))]
    weights, z = packed_experts(len(counts), 288, 128), torch.randn(len(ids), 288) * 3
    rows, idx = moe_native.run(z, ids, weights, *beta, isa=isa)
    want, want_idx = experts_unfinalized.meaning(z.double(), ids, *weights, *beta)
    meaning, _ = experts_unfinalized.meaning(z, ids, *weights, *beta)
    assert torch.equal(idx, want_idx)
    assert error(rows, want) <= 1.1 * error(meaning, want)


@pytest.mark.parametrize("tokens", [1, 6, 20])
def test_columns_beyond_what_is_unpacked_at_once_are_added(isa, tokens):
    ids = torch.zeros(tokens, 1, dtype=torch.int64)
    weights, z = packed_experts(1, 2080, 32), torch.randn(tokens, 2080)
    rows, _ = moe_native.run(z, ids, weights, *BETAS, isa=isa)
    want, _ = experts_unfinalized.meaning(z.double(), ids, *weights, *BETAS)
    meaning, _ = experts_unfinalized.meaning(z, ids, *weights, *BETAS)
    assert error(rows, want) <= 1.1 * error(meaning, want)


def test_every_code_and_scale_byte_is_read_as_the_format_says(isa):
    codes = torch.arange(256, dtype=torch.uint8).repeat(16)[: 32 * 16].view(1, 32, 16)
    codes = torch.stack([codes[0], codes[0].flip(0).flip(1)])  # [2, 32, 16]: every byte, in every place
    for byte in (0, 1, 126, 127, 128, 240):
        scale = torch.full((2, 32, 1), byte, dtype=torch.uint8)
        one = torch.full((2, 32, 1), 127, dtype=torch.uint8)
        weights = codes, one, codes.flip(1), one, codes, scale
        z, ids = torch.eye(32)[:4] * 0.5, torch.tensor([[0, 1], [1, 0], [0, 1], [1, 1]])
        rows, _ = moe_native.run(z, ids, weights, *BETAS, isa=isa)
        want, _ = experts_unfinalized.meaning(z.double(), ids, *weights, *BETAS)
        assert error(rows, want) < 1e-6, byte


def test_holes_are_not_read_and_their_rows_are_zero(isa):
    weights, z = packed_experts(3, 64, 32), torch.randn(5, 64)
    ids = torch.tensor([[-1, 2], [0, -1], [-1, -1], [1, 0], [2, 2]])
    z[2] = torch.nan
    rows, idx = moe_native.run(z, ids, weights, *BETAS, isa=isa)
    want, want_idx = experts_unfinalized.meaning(z, ids, *weights, *BETAS)
    assert torch.equal(idx, want_idx)
    assert torch.equal(rows[6:], torch.zeros(4, 64))
    torch.testing.assert_close(rows, want, rtol=1e-5, atol=1e-6)


def test_a_row_of_nan_harms_no_other(isa):
    weights, z = packed_experts(2, 64, 32), torch.randn(40, 64)
    ids = torch.arange(40).remainder(2).unsqueeze(1)
    clean, idx = moe_native.run(z, ids, weights, *BETAS, isa=isa)
    z[6] = torch.nan
    rows, _ = moe_native.run(z, ids, weights, *BETAS, isa=isa)
    sick = idx[6].item()
    assert torch.isnan(rows[sick]).all()
    others = [r for r in range(40) if r != sick]
    assert torch.equal(rows[others], clean[others])


def beside_nan(tensor):
    """The same values in the middle of memory full of NaN (bytes 255 for codes)."""
    bad = float("nan") if tensor.is_floating_point() else 255 if tensor.dtype == torch.uint8 else 10**9
    room = torch.full((tensor.numel() + 128,), bad, dtype=tensor.dtype)
    room[64:-64] = tensor.flatten()
    return room[64:-64].view(tensor.shape)


@pytest.mark.parametrize("tokens", [1, 7, 50])
def test_nothing_beside_the_arguments_is_read(isa, tokens):
    weights, z = packed_experts(3, 64, 96), torch.randn(tokens, 64)
    ids = torch.randint(-1, 3, (tokens, 2))
    want, _ = moe_native.run(z, ids, weights, *BETAS, isa=isa)
    wide = torch.full((tokens, 192), torch.nan)
    wide[:, 64:128] = z
    hidden = [beside_nan(w) for w in weights]
    rows, _ = moe_native.run(wide[:, 64:128], beside_nan(ids), hidden, *BETAS, isa=isa)
    assert torch.equal(rows, want)
    columns = torch.full((64, 2 * tokens), torch.nan)
    columns[:, ::2] = z.t()
    rows, _ = moe_native.run(columns[:, ::2].t(), ids, weights, *BETAS, isa=isa)
    assert torch.equal(rows, want), "columns that are no neighbours"


def test_nothing_beside_the_results_is_written(isa, monkeypatch):
    weights, z = packed_experts(3, 64, 96), torch.randn(50, 64)
    ids = torch.randint(-1, 3, (50, 2))
    made, new_empty, empty = [], torch.Tensor.new_empty, torch.empty

    def guarded(shape, dtype):
        count = int(torch.Size(shape).numel())
        room = torch.full((count + 128,), 77, dtype=dtype)
        made.append(room)
        return room[64 : 64 + count].view(shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", lambda t, *s: guarded(s, t.dtype))
    monkeypatch.setattr(torch, "empty", lambda *s, dtype: guarded(s, dtype))
    moe_native.run(z, ids, weights, *BETAS, isa=isa)
    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    monkeypatch.setattr(torch, "empty", empty)
    assert len(made) == 3
    for room in made:
        assert (room[:64] == 77).all()
        assert (room[-64:] == 77).all()


def test_a_row_does_not_depend_on_how_many_threads_made_it(isa):
    weights, z, ids = packed_experts(3, 64, 96), torch.randn(40, 64), torch.randint(0, 3, (40, 2))
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(moe_native.run(z, ids, weights, *BETAS, isa=isa)[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_no_tokens_are_no_rows(isa):
    weights = packed_experts(2, 64, 32)
    rows, idx = moe_native.run(
        torch.empty(0, 64), torch.empty(0, 3, dtype=torch.int64), weights, *BETAS, isa=isa
    )
    assert rows.shape == (0, 64)
    assert idx.shape == (0, 3)


def test_an_id_that_names_no_expert_is_refused(isa):
    with pytest.raises(AssertionError, match="not one of 2 experts"):
        moe_native.run(torch.randn(1, 64), torch.tensor([[2]]), packed_experts(2, 64, 32), *BETAS, isa=isa)


def arguments(z, weights):
    return z, torch.zeros(len(z), 1, dtype=torch.int64), *weights, *BETAS


def test_it_objects_to_what_it_cannot_do(monkeypatch):
    weights, z = packed_experts(2, 64, 32), torch.randn(1, 64)
    assert (
        moe_native.objection(*arguments(z.double(), weights)) == "activations are torch.float64, not float32"
    )
    assert moe_native.objection(*arguments(z.to("meta"), weights)) == "meta tensors"
    gapped = [w[..., ::2] if i == 0 else w for i, w in enumerate(weights)]
    assert moe_native.objection(*arguments(z, gapped)) == "weights with gaps"
    monkeypatch.setattr(build, "_LOADED", {})
    monkeypatch.setattr(build, "compilers", list)
    assert "no C++ compiler" in moe_native.objection(*arguments(z, weights))


def test_cached_code_runs_where_nothing_can_be_compiled(monkeypatch):
    args = arguments(torch.randn(3, 64), packed_experts(2, 64, 32))
    monkeypatch.setattr(build, "_LOADED", {})
    monkeypatch.setattr(build, "compilers", list)
    with pytest.warns(RuntimeWarning, match="no C\\+\\+ compiler.* the reference computes it"):
        got, idx = torch.ops.k3.experts_unfinalized.native(*args)
    want, want_idx = experts_unfinalized.meaning(*args)
    assert torch.equal(got, want)
    assert torch.equal(idx, want_idx)


def test_it_is_chosen_and_a_report_says_so():
    args = arguments(torch.randn(3, 64), packed_experts(2, 64, 32))
    if reason := build.unavailable("moe"):
        pytest.skip(reason)
    compiled = Compiled(lambda *a: experts_unfinalized.overload(*a), (Lower(),))
    got = compiled(*args)
    assert compiled.targets()[0] == "k3.experts_unfinalized.native"
    (remark,) = compiled.remarks(name="lower")
    assert remark.reason == "computed by native, C++ that was compiled here"
    torch.testing.assert_close(got[0], experts_unfinalized.meaning(*args)[0], rtol=1e-5, atol=1e-6)
