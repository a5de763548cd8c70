"""The fused KDA step in Triton, interpreted, against the float64 meaning and around its slots."""

import pytest
import torch
from interpreted import check_op, check_samples, interpreted, meaning_of
from k3compile.kernels.kda_decode import kda_decode
from k3compile.kernels.kda_decode_triton import objection
from lanes import thinned


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_samples_come_out_as_the_meaning_says(dtype):
    check_samples("kda_decode", dtype)


def sample(i=2):
    return list(list(kda_decode.each_sample())[i])


def gaps_of(pool):
    """What lies between the slots of a pool made by ``gapped``."""
    return pool.as_strided(pool.shape, pool.stride(), pool[0].numel())


def test_slots_move_in_place_and_their_neighbours_stay():
    args = sample(1)  # its pools have gaps
    window, state, slots = args[8], args[9], args[10]
    others = [s for s in range(len(state)) if s not in slots.tolist()]
    for pool in (window, state):
        gaps_of(pool).fill_(torch.nan)
        pool[others] = torch.nan
    fn = kda_decode.implementations["triton"].fn
    y, after = interpreted(fn.__module__, fn.__name__, *args)
    (want,), (moved, stepped) = meaning_of("kda_decode", args)
    torch.testing.assert_close(y.double(), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(after[8][slots].double(), moved[slots], atol=0, rtol=0)
    torch.testing.assert_close(after[9][slots].double(), stepped[slots], atol=1e-5, rtol=0)
    for pool in after[8:10]:
        assert gaps_of(pool).isnan().all(), "the memory between slots was written"
        assert pool[others].isnan().all(), "another slot was written"


@pytest.mark.parametrize("bound", [-5.0, 0.0])
@pytest.mark.parametrize("f", thinned([-1e4, -30.0, 30.0, 1e4], 2))
def test_gates_at_their_ends_stay_finite(f, bound):
    args = sample()
    args[2], args[11] = torch.full_like(args[2], f), bound
    check_op("kda_decode", torch.float32, args)


def test_a_gate_that_forgets_nothing_and_a_beta_of_zero_keep_the_state():
    args = sample()
    args[2], args[3] = torch.full_like(args[2], -1e4), torch.full_like(args[3], -1e4)
    _, (_, state) = check_op("kda_decode", torch.float32, args)
    assert torch.equal(state, args[9])


def test_what_does_not_fit_is_refused(monkeypatch):
    from k3compile.kernels import kda_decode_triton

    args = sample()
    assert objection(*args) == "cpu tensors"
    monkeypatch.setattr(kda_decode_triton, "no_gpu", lambda *tensors: None)
    monkeypatch.setattr(kda_decode_triton, "not_rows", lambda **tensors: None)
    assert objection(*args) is None
    turned = args.copy()
    turned[9] = args[9].mT.contiguous().mT
    assert objection(*turned) == "a slot's state is not in one piece"
    wide = args.copy()
    wide[9] = torch.empty(1, 1, 256, 128, device="meta")
    assert "256 x 128 does not fit" in objection(*wide)
    other = args.copy()
    other[8] = args[8].bfloat16()
    assert "windows of torch.bfloat16" in objection(*other)
