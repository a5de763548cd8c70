"""KDA ops in Triton, interpreted: against their float64 meanings, into a caller's rows, and refusals."""

import pytest
import torch
from interpreted import check_op, check_samples, meaning_of, outcome_of
from k3compile.kernels import OPS
from k3compile.kernels.kda_triton import decay_objection, objection
from kda_rows import error_ratios, near, poisoned

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
PREFILLS = ("kda_prefill", "kda_prefill_into", "kda_prefill_export", "kda_prefill_export_into")


@FLOATS
def test_decays_come_out_as_the_meaning_says(dtype):
    check_samples("kda_decay", dtype)


@pytest.mark.parametrize("bound", [-5.0, 0.0])
@pytest.mark.parametrize("f", [-1e4, -30.0, 30.0, 1e4])
def test_decays_of_gates_at_their_ends_are_finite(f, bound):
    args = torch.full((3, 2, 8), f), torch.randn(2), torch.randn(16), bound
    check_op("kda_decay", torch.float32, args)


@pytest.mark.slow
@FLOATS
@pytest.mark.parametrize("name", PREFILLS)
def test_samples_come_out_as_the_meaning_says(name, dtype):
    check_samples(name, dtype)


@FLOATS
def test_short_rows_come_out_as_the_meaning_says(dtype):
    args = poisoned([5, 1, 0, 3], past=0, dtype=dtype)
    args[5] = args[5].nan_to_num()
    check_op("kda_prefill", dtype, args)


@pytest.mark.parametrize("name", ["kda_prefill_into", "kda_prefill_export_into"])
def test_only_its_rows_of_a_callers_buffer_are_written(name):
    args = poisoned([3, 2])
    out = torch.full((9, 2, 8), 7.0)[:, 1:]
    columns = [torch.tensor([0, 0], dtype=torch.int32)] * 2 if "export" in name else []
    _, (_, left) = outcome_of(name, [*args, *columns, out, 2])
    (want,), _ = meaning_of("kda_prefill", args)
    near(left[2:7], want[:5], 1e-6)
    assert (left[[0, 1, 7, 8]] == 7.0).all()
    assert (left.as_strided(left.shape, left.stride(), 0) == 7.0).all(), "heads beside it were written"


@pytest.mark.slow
@FLOATS
@pytest.mark.parametrize(("keys", "values"), [(16, 8), (32, 32)], ids=["small", "large"])
def test_errors_of_outputs_and_states_are_no_larger_than_the_meanings(dtype, keys, values):
    calls = []
    for seed in range(4):
        args = poisoned([40, 70], heads=2, keys=keys, values=values, past=0, dtype=dtype, seed=seed)
        args[5] = args[5].nan_to_num()
        calls.append(args)
    assert max(error_ratios("kda_prefill", calls)) <= 1.1


@FLOATS
@pytest.mark.parametrize("bound", [-5.0, 0.0])
def test_errors_of_decays_are_no_larger_than_the_meanings(dtype, bound):
    calls = []
    for seed in range(4):
        source = torch.Generator().manual_seed(seed)
        f, a, b = (torch.randn(n, generator=source) for n in ((40, 2, 32), (2,), (64,)))
        calls.append(((3 * f).to(dtype), a, b, bound))
    assert max(error_ratios("kda_decay", calls)) <= 1.1


def test_what_does_not_fit_is_refused(monkeypatch):
    from k3compile.kernels import kda_triton

    args = poisoned([3])
    f = torch.randn(3, 2, 8), torch.randn(2), torch.randn(16), -5.0
    assert objection(*args) == "cpu tensors"
    assert decay_objection(*f) == "cpu tensors"
    monkeypatch.setattr(kda_triton, "no_gpu", lambda *tensors: None)
    assert objection(*args) is None
    assert decay_objection(*f) is None
    assert "float64" in objection(args[0].double(), *args[1:])
    assert "bfloat16 where kernels take float32" in objection(*args[:5], args[5].bfloat16(), *args[6:])
    assert "elements 8 apart" in objection(*args[:5], args[5].mT.contiguous().mT, *args[6:])
    assert "argument 9 has elements" in objection(*args, torch.zeros(9, 8, 2).mT, 0)
    wide = poisoned([2], keys=132)
    assert "132 channels, more than 128" in objection(*wide)
    assert set(PREFILLS) <= {name for name, op in OPS.items() if "triton" in op.implementations}
