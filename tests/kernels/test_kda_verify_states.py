"""Verify without records: the state after every row has a slot of its own, and nothing is to be committed."""

import k3compile.kernels  # noqa: F401  registers the ops
import pytest
import torch
from k3compile.kernels.samples import gapped, row_bounds
from kda_oracle import Case, case, recurrence, worst

k3 = torch.ops.k3
J = 9
HOMES = [5, 2, 7]


def batch(rows, dtype=torch.float64, own=0):
    """(q, k, v, g, beta), states with NaN where nobody lives, slots, cu, and scratch slots.

    own: the row whose target is the slot that the request lives in.
    """
    flat = [torch.cat(parts).to(dtype) for parts in zip(*(row[:5] for row in rows))]
    state = torch.full((40, *rows[0].state.shape), torch.nan, dtype=dtype)
    slots, free = torch.tensor(HOMES[: len(rows)]), iter(range(8, 40))
    state[slots] = torch.stack([row.state for row in rows]).to(dtype)
    lines = [[next(free) for _ in range(J)] for _ in rows]
    for line, home in zip(lines, HOMES):
        if own is not None:
            line[own] = home
    return flat, state, slots, row_bounds([len(row.q) for row in rows]), torch.tensor(lines)


def head(row, m):
    return Case(*(x[:m] for x in row[:5]), row.state)


@pytest.mark.parametrize(("keys", "values"), [(24, 16), (128, 128)], ids=["small", "large"])
@pytest.mark.parametrize("own", [0, 2, 8, None])
def test_every_target_holds_the_state_after_its_row_and_nothing_else_is_written(keys, values, own):
    rows = [case(n, n, keys=keys, values=values) for n in (4, 1, 9)]
    for dtype, bound in ((torch.float64, 1e-13), (torch.float32, 2e-6)):
        flat, state, slots, cu, scratch = batch(rows, dtype, own)
        k3.kda_verify_states(*flat, state, slots, cu, scratch)
        for line, row in zip(scratch, rows):
            for i in range(len(row.q)):
                assert worst(state[line[i]], recurrence(head(row, i + 1))[1]) < bound
        written = {s.item() for line, row in zip(scratch, rows) for s in line[: len(row.q)]}
        left = [s for s in range(len(state)) if s not in {*written, *HOMES}]
        assert torch.isnan(state[left]).all()
        for home, row in zip(HOMES, rows):
            assert home in written or torch.equal(state[home], row.state.to(dtype))


def test_the_outputs_have_the_bits_of_the_form_with_records():
    rows = [case(n, n) for n in (9, 1, 4)]
    flat, state, slots, cu, scratch = batch(rows)
    heads, values, keys = rows[0].state.shape
    records = [torch.zeros(8, J, heads, n, dtype=torch.float64) for n in (values, keys, keys)]
    want = k3.kda_verify(*flat, state, slots, cu, *records)
    assert torch.equal(k3.kda_verify_states(*flat, state, slots, cu, scratch), want)


def test_unbounded_decays_reach_the_states():
    row = case(9, 4)
    row = row._replace(g=row.g * 30)
    flat, state, slots, cu, scratch = batch([row])
    k3.kda_verify_states(*flat, state, slots, cu, scratch)
    assert all(worst(state[scratch[0, i]], recurrence(head(row, i + 1))[1]) < 1e-13 for i in range(9))


def test_into_writes_its_rows_and_no_other():
    rows = [case(n, n) for n in (2, 5)]
    flat, state, slots, cu, scratch = batch(rows)
    want = k3.kda_verify_states(*flat, state.clone(), slots, cu, scratch)
    out = torch.full((12, *rows[0].v.shape[1:]), 7.0, dtype=torch.float64)
    k3.kda_verify_states_into(*flat, state, slots, cu, scratch, out, 4)
    assert torch.equal(out[4:11], want)
    assert (out[:4] == 7.0).all()
    assert (out[11:] == 7.0).all()


@pytest.mark.parametrize(("keys", "values"), [(24, 16), (128, 128)], ids=["small", "large"])
def test_nothing_past_the_rows_is_read_and_gaps_stay(keys, values):
    rows = [case(n, n, keys=keys, values=values) for n in (3, 1)]
    flat, state, slots, cu, scratch = batch(rows)
    pool = gapped(state)
    want = k3.kda_verify_states(*flat, state, slots, cu, scratch)
    tailed = [torch.cat([x, torch.full((2, *x.shape[1:]), torch.nan, dtype=x.dtype)]) for x in flat]
    assert torch.equal(k3.kda_verify_states(*tailed, pool, slots, cu, scratch)[:4], want)
    assert torch.equal(pool.nan_to_num(), state.nan_to_num())
    assert (pool._base[:, 1] == 0).all()


def test_an_empty_row_leaves_its_slot_alone():
    rows = [case(3), case(0, keys=24), case(2, 1)]
    flat, state, slots, cu, scratch = batch(rows)
    k3.kda_verify_states(*flat, state, slots, cu, scratch)
    assert torch.equal(state[2], rows[1].state)
    assert worst(state[scratch[2, 1]], recurrence(rows[2])[1]) < 1e-13


def test_too_long_a_row_and_targets_that_meet_are_refused_before_anything_is_written():
    flat, state, slots, cu, scratch = batch([case(10)])
    with pytest.raises(ValueError, match="10 tokens, scratch has slots for 9"):
        k3.kda_verify_states(*flat, state, slots, cu, scratch)
    flat, state, slots, cu, scratch = batch([case(3), case(2, 1)])
    before = state.clone()
    for line, column, slot in ((0, 1, 5), (0, 1, scratch[1, 1].item()), (0, 2, 2)):
        wrong = scratch.clone()
        wrong[line, column] = slot
        with pytest.raises(ValueError, match="a state needs a slot of its own"):
            k3.kda_verify_states(*flat, state, slots, cu, wrong)
    assert torch.equal(state.nan_to_num(), before.nan_to_num())
