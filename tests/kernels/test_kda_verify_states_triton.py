"""Verify without records in Triton, interpreted: states after every draft, in slots of their own."""

import pytest
import torch
from interpreted import check_op, check_samples, meaning_of, outcome_of
from k3compile.kernels import OPS
from kda_rows import error_ratios, near, poisoned, untouched

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
J = 5


@FLOATS
@pytest.mark.parametrize("name", ["kda_verify_states", "kda_verify_states_into"])
def test_samples_come_out_as_the_meaning_says(name, dtype):
    check_samples(name, dtype)


def drafts(lengths, own=0, slots=24, **how):
    """Arguments of kda_verify_states; own: the row whose target is the slot its request lives in."""
    args = poisoned(lengths, slots=slots, **how)
    free = iter([s for s in range(1, slots) if s not in args[6].tolist()])
    lines = [
        [home if i == own else next(free) for i in range(n)] + [0] * (J - n)
        for home, n in zip(args[6].tolist(), lengths)
    ]
    return [*args, torch.tensor(lines, dtype=torch.int64).view(-1, J)]


def targets(args, lengths):
    return [s for line, n in zip(args[8].tolist(), lengths) for s in line[:n]]


@FLOATS
@pytest.mark.parametrize("own", [0, 2, None])
def test_every_target_holds_the_state_after_its_row_and_nothing_else_is_written(dtype, own):
    lengths = [4, 0, 1, 5]
    args = drafts(lengths, own, dtype=dtype, heads=2)
    (got,), (left,) = outcome_of("kda_verify_states", args)
    (want,), (stepped,) = meaning_of("kda_verify_states", args)
    assert torch.equal(got[10:], torch.zeros_like(got[10:])), "rows of nobody are zero"
    near(got[:10], want[:10], 1e-6 if dtype == torch.float32 else 5e-3)
    written = targets(args, lengths)
    near(left[written], stepped[written], 1e-6)
    homes = [s for s in args[6].tolist() if s not in written]
    assert torch.equal(left[homes], args[5][homes]), "a state is only read"
    untouched(left, [*written, *homes])


def test_no_rows_and_only_rows_of_nobody():
    for lengths in ([], [0, 0]):
        (got,), (left,) = outcome_of("kda_verify_states", drafts(lengths, past=4))
        assert torch.equal(got, torch.zeros_like(got))
        assert left.isnan().sum() == left.numel() - len(lengths) * left[0].numel()


def test_only_its_rows_of_a_callers_buffer_are_written():
    args = drafts([3, 2])
    out = torch.full((9, 2, 8), 7.0)[:, 1:]
    _, (_, left) = outcome_of("kda_verify_states_into", [*args, out, 2])
    (want,), _ = meaning_of("kda_verify_states", args)
    near(left[2:7], want[:5], 1e-6)
    assert (left[[0, 1, 7, 8]] == 7.0).all()
    assert (left.as_strided(left.shape, left.stride(), 0) == 7.0).all(), "heads beside it were written"


def test_the_outputs_have_the_bits_of_the_form_with_records():
    args = drafts([4, 1], past=0, keys=72, values=40)
    heads, values, keys = args[5].shape[1:]
    records = [torch.zeros(24, J, heads, n) for n in (values, keys, keys)]
    (want,), _ = outcome_of("kda_verify", [*args[:8], *records])
    (got,), _ = outcome_of("kda_verify_states", args)
    assert torch.equal(got, want)


@pytest.mark.parametrize("place", [-1, 24])
def test_a_slot_that_does_not_exist_gets_no_state(place):
    args = drafts([2])
    args[8][0, 1] = place
    room = torch.full((26, 2, *args[5].shape[1:]), torch.nan)  # a slot before the pool and one behind
    room[1:-1, 0] = args[5]
    args[5] = room[1:-1, 0]
    (got,), (left,) = outcome_of("kda_verify_states", args)
    (want,), _ = meaning_of("kda_prefill", args[:8])
    near(got[:2], want[:2], 1e-6)
    untouched(left.as_strided(room[:, 0].shape, room[:, 0].stride(), 0), (1 + args[6]).tolist())


def test_more_tokens_than_slots_are_computed_and_leave_no_state():
    args = drafts([4])
    args[8] = args[8][:, :2]
    (got,), (left,) = outcome_of("kda_verify_states", args)
    (want,), _ = meaning_of("kda_prefill", args[:8])
    near(got[:4], want[:4], 1e-6)
    untouched(left, args[8][0].tolist())


def test_columns_of_a_wider_table_are_read_where_they_lie():
    args = drafts([3, 5])
    args[8] = torch.stack([args[8], torch.zeros_like(args[8])], 2)[:, :, 0]
    check_op(
        "kda_verify_states", torch.float32, [x.nan_to_num() if x.is_floating_point() else x for x in args]
    )


@FLOATS
def test_errors_are_no_larger_than_the_meanings(dtype):
    calls = []
    for seed in range(6):
        args = drafts([5, 4], dtype=dtype, past=0, seed=seed, keys=32, values=32)
        calls.append([*args[:5], args[5].nan_to_num(), *args[6:]])
    assert max(error_ratios("kda_verify_states", calls)) <= 1.1


def test_what_does_not_fit_is_refused(monkeypatch):
    from k3compile.kernels import kda_triton

    objection = OPS["kda_verify_states"].implementations["triton"].objection
    args = drafts([2])
    assert objection(*args) == "cpu tensors"
    monkeypatch.setattr(kda_triton, "no_gpu", lambda *tensors: None)
    assert objection(*args) is None
    assert "bfloat16 where kernels take float32" in objection(*args[:5], args[5].bfloat16(), *args[6:])
