"""Verify leaves the state; committing m rows equals a run that only ever saw those m."""

import k3compile.kernels  # noqa: F401  registers the ops
import pytest
import torch
from k3compile.kernels.samples import gapped, row_bounds
from kda_oracle import Case, case, recurrence, worst

k3 = torch.ops.k3
SLOTS, J = 8, 9


def batch(rows, dtype=torch.float64):
    """(q, k, v, g, beta), pools with NaN wherever nothing was written, slots, cu."""
    flat = [torch.cat(parts).to(dtype) for parts in zip(*(row[:5] for row in rows))]
    heads, values, keys = rows[0].state.shape
    slots = torch.tensor([5, 2, 7, 1][: len(rows)])
    state = torch.full((SLOTS, heads, values, keys), torch.nan, dtype=dtype)
    state[slots] = torch.stack([row.state for row in rows]).to(dtype)
    records = [torch.full((SLOTS, J, heads, n), torch.nan, dtype=dtype) for n in (values, keys, keys)]
    return flat, state, slots, row_bounds([len(row.q) for row in rows]), records


def pools_of_conv(rows, slots, dtype=torch.float64):
    window, raw = torch.randn(SLOTS, 3, 10, dtype=dtype), torch.full((SLOTS, J, 10), torch.nan, dtype=dtype)
    for row, slot in zip(rows, slots):
        raw[slot, : len(row.q)] = torch.randn(len(row.q), 10, dtype=dtype)
    return window, raw


def head(row, m):
    return Case(*(x[:m] for x in row[:5]), row.state)


def test_outputs_equal_prefill_and_the_state_is_left_alone():
    rows = [case(n, n) for n in (9, 1, 4)]
    flat, state, slots, cu, records = batch(rows)
    before = state.clone()
    out = k3.kda_verify(*flat, state, slots, cu, *records)
    assert torch.equal(state.nan_to_num(), before.nan_to_num())
    for r, row in enumerate(rows):
        assert worst(out[cu[r] : cu[r + 1]], recurrence(row)[0]) < 1e-13


def test_records_hold_corrections_keys_and_decays():
    row = case(5)
    flat, state, slots, cu, (rec_u, rec_k, rec_g) = batch([row])
    k3.kda_verify(*flat, state, slots, cu, rec_u, rec_k, rec_g)
    s = row.state
    for i in range(5):
        decayed = s * row.g[i].exp().unsqueeze(1)
        u = row.beta[i, :, None] * (row.v[i] - torch.einsum("hvk,hk->hv", decayed, row.k[i]))
        assert worst(rec_u[5, i], u) < 1e-13
        s = decayed + u.unsqueeze(2) * row.k[i].unsqueeze(1)
    assert torch.equal(rec_k[5, :5], row.k)
    assert torch.equal(rec_g[5, :5], row.g)
    untouched = [
        torch.isnan(r[5, 5:]).all() and torch.isnan(r[[0, 1, 2, 3, 4, 6, 7]]).all() for r in (rec_u, rec_k)
    ]
    assert all(untouched)


@pytest.mark.parametrize("steep", [False, True], ids=["bounded", "unbounded"])
@pytest.mark.parametrize("m", range(10))
def test_committing_m_rows_equals_a_run_that_only_saw_those(m, steep):
    row = case(9, 4)
    if steep:
        row = row._replace(g=row.g * 30)
    for dtype, bound in ((torch.float64, 1e-13), (torch.float32, 2e-6)):
        flat, state, slots, cu, records = batch([row], dtype)
        window, raw = pools_of_conv([row], slots, dtype)
        strip = torch.cat([window[5], raw[5, :m]])
        k3.kda_verify(*flat, state, slots, cu, *records)
        k3.kda_commit(state, window, *records, raw, slots, torch.tensor([m]), slots)
        assert worst(state[5], recurrence(head(row, m))[1]) < bound
        assert torch.equal(window[5], strip[-3:])
        if m == 0:
            assert torch.equal(state[5], row.state.to(dtype))


def test_rows_commit_apart_and_the_next_step_goes_on_from_there():
    rows, accepted = [case(n, n) for n in (9, 3, 6, 1)], [4, 0, 6, 1]
    flat, state, slots, cu, records = batch(rows)
    window, raw = pools_of_conv(rows, slots)
    k3.kda_verify(*flat, state, slots, cu, *records)
    k3.kda_commit(state, window, *records, raw, slots, torch.tensor(accepted), slots)
    assert torch.isnan(state[[0, 3, 4, 6]]).all()
    nexts = [
        case(2, 50 + r)._replace(state=recurrence(head(row, m))[1])
        for r, (row, m) in enumerate(zip(rows, accepted))
    ]
    flat = [torch.cat(parts) for parts in zip(*(row[:5] for row in nexts))]
    out = k3.kda_prefill(*flat, state, slots, row_bounds([2] * 4))
    for r, row in enumerate(nexts):
        assert worst(out[2 * r : 2 * r + 2], recurrence(row)[0]) < 1e-13


BOTH_SIZES = pytest.mark.parametrize(("keys", "values"), [(24, 16), (128, 128)])


@BOTH_SIZES
def test_a_state_inside_the_accepted_rows_goes_to_a_slot_without_records_and_the_rest_in_place(keys, values):
    rows, inside, accepted = [case(6, s, keys=keys, values=values) for s in range(3)], [2, 5, 1], [5, 5, 0]
    flat, state, slots, cu, records = batch(rows)
    window, raw = pools_of_conv(rows, slots)
    strips = [torch.cat([window[slot], raw[slot, :6]]) for slot in slots]
    k3.kda_verify(*flat, state, slots, cu, *records)
    state, window = (torch.cat([pool, torch.full_like(pool[:3], torch.nan)]) for pool in (state, window))
    places = torch.tensor([9, 8, 10])
    counts = torch.tensor([*inside, *accepted])
    k3.kda_commit(state, window, *records, raw, slots.repeat(2), counts, torch.cat([places, slots]))
    for r, row in enumerate(rows):
        for count, slot in ((inside[r], places[r]), (accepted[r], slots[r])):
            assert worst(state[slot], recurrence(head(row, count))[1]) < 1e-13
            assert torch.equal(window[slot], strips[r][count : count + 3])


def test_a_count_of_zero_copies_the_bits_elsewhere():
    rows = [case(3), case(3, 1)]
    flat, state, slots, cu, records = batch(rows)
    window, raw = pools_of_conv(rows, slots)
    k3.kda_verify(*flat, state, slots, cu, *records)
    for counts in ([0, 0], [0, 2]):
        k3.kda_commit(state, window, *records, raw, slots, torch.tensor(counts), torch.tensor([7, 1]))
        assert torch.equal(state[7], rows[0].state)
        assert torch.equal(window[7], window[5])


@BOTH_SIZES
def test_all_layers_in_one_call_have_the_bits_of_one_call_each(keys, values):
    rows, layers = [case(4, s, keys=keys, values=values) for s in range(2)], []
    for layer in range(3):
        flat, state, slots, cu, records = batch(rows)
        window, raw = pools_of_conv(rows, slots)
        k3.kda_verify(*(x * (1 - 0.1 * layer) for x in flat), state, slots, cu, *records)
        layers.append([state, window, *records, raw])
    stacked = [torch.stack(pools) for pools in zip(*layers)]
    slots, accepted, into = (torch.tensor(x) for x in ([5, 2, 5], [1, 3, 4], [7, 2, 5]))
    k3.kda_commit(*stacked, slots, accepted, into)
    for layer, pools in enumerate(layers):
        k3.kda_commit(*pools, slots, accepted, into)
        for all_of_them, alone in zip(stacked, pools):
            assert torch.equal(all_of_them[layer].nan_to_num(), alone.nan_to_num())


@BOTH_SIZES
def test_small_and_large_states_commit_alike(keys, values):
    rows = [case(4, s, keys=keys, values=values) for s in range(3)]
    flat, state, slots, cu, records = batch(rows)
    window, raw = pools_of_conv(rows, slots)
    k3.kda_verify(*flat, state, slots, cu, *records)
    k3.kda_commit(state, window, *records, raw, slots, torch.tensor([1, 4, 2]), slots)
    for r, m in enumerate((1, 4, 2)):
        assert worst(state[slots[r]], recurrence(head(rows[r], m))[1]) < 1e-13


def test_into_writes_its_rows_and_no_other():
    rows = [case(n, n) for n in (2, 5)]
    flat, state, slots, cu, records = batch(rows)
    want = k3.kda_verify(*flat, state, slots, cu, *[r.clone() for r in records])
    out = torch.full((12, *rows[0].v.shape[1:]), 7.0, dtype=torch.float64)
    k3.kda_verify_into(*flat, state, slots, cu, *records, out, 4)
    assert torch.equal(out[4:11], want)
    assert (out[:4] == 7.0).all()
    assert (out[11:] == 7.0).all()


def test_nothing_past_the_rows_is_read_and_gaps_stay():
    rows = [case(n, n) for n in (3, 1)]
    flat, state, slots, cu, records = batch(rows)
    want = k3.kda_verify(*flat, state, slots, cu, *[r.clone() for r in records])
    tailed = [torch.cat([x, torch.full((2, *x.shape[1:]), torch.nan, dtype=x.dtype)]) for x in flat]
    pools = [gapped(r) for r in records]
    out = k3.kda_verify(*tailed, gapped(state), slots, cu, *pools)
    assert torch.equal(out[:4], want)
    assert all((pool._base[:, 1] == 0).all() for pool in pools)
    gaps, window = gapped(state), torch.randn(SLOTS, 3, 10, dtype=torch.float64)
    raw = torch.zeros(SLOTS, J, 10, dtype=torch.float64)
    k3.kda_commit(gaps, gapped(window), *pools, raw, slots, torch.tensor([3, 1]), slots)
    assert (gaps._base[:, 1] == 0).all()


def test_too_long_a_row_and_too_large_a_count_are_refused():
    row = case(10)
    flat, state, slots, cu, records = batch([row])
    with pytest.raises(ValueError, match="10 tokens, the records hold 9"):
        k3.kda_verify(*flat, state, slots, cu, *records)
    window, raw = pools_of_conv([case(1)], slots)
    for wrong in (10, -1):
        with pytest.raises(ValueError, match=r"accepted must lie in 0\.\.9"):
            k3.kda_commit(state, window, *records, raw, slots, torch.tensor([wrong]), slots)


@pytest.mark.parametrize(
    ("slots", "into"), [([5, 2], [3, 3]), ([5, 2], [2, 2]), ([5, 2], [2, 3]), ([5, 2], [5, 5])], ids=str
)
def test_two_rows_may_not_meet_in_one_slot_and_nothing_is_written(slots, into):
    _, state, homes, _, records = batch([case(3), case(3, 1)])
    window, raw = pools_of_conv([case(3)] * 2, homes)
    before = state.clone(), window.clone()
    columns = [torch.tensor(x) for x in (slots, [1, 2], into)]
    with pytest.raises(ValueError, match="its own slot or one that no other row has or writes"):
        k3.kda_commit(state, window, *records, raw, *columns)
    assert torch.equal(state.nan_to_num(), before[0].nan_to_num())
    assert torch.equal(window, before[1])
