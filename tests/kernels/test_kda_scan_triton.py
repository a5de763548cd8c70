"""KDA of equally long sequences in Triton, interpreted: against the float64 meaning, and its checkpoints."""

import pytest
import torch
from interpreted import check_samples, interpreted, meaning_of, outcome_of
from k3compile.kernels.kda_scan_triton import objection
from k3compile.kernels.samples import Draw
from kda_rows import error_ratios, near
from lanes import thinned

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.mark.slow
@FLOATS
@pytest.mark.parametrize("name", ["kda_scan", "kda_scan_export"])
def test_samples_come_out_as_the_meaning_says(name, dtype):
    check_samples(name, dtype)


def sequences(count, tokens, keys=16, values=8, dtype=torch.float32, seed=0):
    """Arguments of kda_scan, cut from rows with NaN beside them."""
    draw, shape = Draw(dtype, seed), (count, tokens, 2)

    def among_nan(x):
        whole = x.new_full((*x.shape[:2], 2, *x.shape[2:]), torch.nan)
        whole[:, :, 1] = x
        return whole[:, :, 1]

    q, k = draw.unit(*shape, keys) * keys**-0.5, draw.unit(*shape, keys)
    g, beta = -5.0 * draw.fraction(*shape, keys) ** 2, draw.fraction(*shape)
    rows = [among_nan(x) for x in (q, k, draw.normal(*shape, values), g, beta)]
    return [*rows, draw.normal_acc(count, 2, values, keys)]


@FLOATS
@pytest.mark.parametrize(("count", "tokens"), [(0, 5), (2, 0), (1, 1), (2, 5)])
def test_sequences_come_out_as_the_meaning_says(count, tokens, dtype):
    args = sequences(count, tokens, dtype=dtype)
    (o, final), after = interpreted("k3compile.kernels.kda_scan_triton", "kda_scan_triton", *args)
    (want, last), _ = meaning_of("kda_scan", args)
    near(o, want, 1e-6 if dtype == torch.float32 else 5e-3)
    near(final, last, 1e-6)
    assert torch.equal(after[5], args[5]), "the state that came in was changed"


def test_a_state_with_gaps_and_turned_is_taken_as_it_lies():
    args = sequences(2, 3)
    (_, want), _ = outcome_of("kda_scan", args)
    args[5] = args[5].mT.contiguous().mT
    (_, got), _ = outcome_of("kda_scan", args)
    assert torch.equal(got, want)
    assert got.is_contiguous()


@pytest.mark.parametrize("offsets", thinned([[3, 0], [5, 2, 0, 0], [4]], 1), ids=str)
def test_checkpoints_go_to_their_site_and_nowhere_else(offsets):
    args = sequences(2, 5)
    pool = torch.full((3, 4, *args[5].shape[1:]), torch.nan)
    column = torch.tensor(offsets, dtype=torch.int32)
    (o, final), (left,) = outcome_of("kda_scan_export", [*args, column, pool, 1])
    (plain, last), _ = outcome_of("kda_scan", args)
    assert torch.equal(o, plain), "a checkpoint changed the outputs"
    assert torch.equal(final, last)
    for b, offset in enumerate(offsets):
        if offset:
            _, want = meaning_of(
                "kda_scan", [x[b : b + 1, :offset] for x in args[:5]] + [args[5][b : b + 1]]
            )[0]
            near(left[1, b], want[0], 1e-6)
    others = [b for b in range(4) if b >= len(offsets) or not offsets[b]]
    assert left[1, others].isnan().all()
    assert left[[0, 2]].isnan().all()


def test_a_wrong_offset_leaves_no_checkpoint():
    args = sequences(2, 3)
    pool = torch.full((1, 2, *args[5].shape[1:]), torch.nan)
    _, (left,) = outcome_of("kda_scan_export", [*args, torch.tensor([4, -1], dtype=torch.int32), pool, 0])
    assert left.isnan().all()


@pytest.mark.slow
@FLOATS
def test_errors_are_no_larger_than_the_meanings(dtype):
    calls = [sequences(2, 40, keys=32, values=32, dtype=dtype, seed=seed) for seed in range(4)]
    assert max(error_ratios("kda_scan", calls)) <= 1.1


def test_what_does_not_fit_is_refused(monkeypatch):
    from k3compile.kernels import kda_scan_triton

    args = sequences(1, 2)
    assert objection(*args) == "cpu tensors"
    monkeypatch.setattr(kda_scan_triton, "no_gpu", lambda *tensors: None)
    assert objection(*args) is None
    assert objection(*args, torch.zeros(1, dtype=torch.int32), args[5][None], 0) is None
    assert "float64" in objection(args[0].double(), *args[1:])
    assert "bfloat16 where kernels take float32" in objection(*args[:5], args[5].bfloat16())
    assert "132 channels, more than 128" in objection(*sequences(1, 1, keys=132))
    assert "elements 2 apart" in objection(args[0].mT.contiguous().mT, *args[1:])
