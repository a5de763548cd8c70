"""KDA prefill against a recurrence written token by token, and against ONNX's LinearAttention."""

import itertools

import k3compile.kernels  # noqa: F401  registers the ops
import pytest
import torch
from k3compile.kernels.samples import gapped, packed_heads, row_bounds
from kda_oracle import Case, case, onnx_attention, recurrence, worst
from torch.nn import functional as F

k3 = torch.ops.k3
SLOTS = 12
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 200, 0, 1, 128]


def batch(rows, dtype=torch.float64):
    """Arguments of kda_prefill for rows in slots 1, 2, ..; every other slot of the pool is NaN."""
    flat = [torch.cat(parts).to(dtype) for parts in zip(*(row[:5] for row in rows))]
    state = torch.full((SLOTS + 1, *rows[0].state.shape), torch.nan, dtype=dtype)
    slots = torch.arange(1, len(rows) + 1)
    state[slots] = torch.stack([row.state for row in rows]).to(dtype)
    return *flat, state, slots, row_bounds([len(row.q) for row in rows])


def errors(args, out, rows):
    """Largest relative error of any row's output and final state."""
    state, slots, cu = args[5:8]
    result = 0.0
    for r, row in enumerate(rows):
        o, s = recurrence(row)
        result = max(result, worst(out[cu[r] : cu[r + 1]], o), worst(state[slots[r]], s))
    return result


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-6)], ids=str)
def test_rows_of_every_length_equal_the_recurrence(dtype, bound):
    rows = [case(n, seed) for seed, n in enumerate(LENGTHS)]
    args = batch(rows, dtype)
    assert errors(args, k3.kda_prefill(*args), rows) < bound


@pytest.mark.parametrize(("keys", "values"), [(16, 16), (8, 40), (40, 8)])
def test_keys_and_values_may_differ_in_width(keys, values):
    rows = [case(n, n, keys=keys, values=values) for n in (1, 5, 70, 130)]
    args = batch(rows)
    assert errors(args, k3.kda_prefill(*args), rows) < 1e-12


@pytest.mark.oracle
@pytest.mark.parametrize("tokens", [1, 7, 64, 100])
def test_onnx_linear_attention_agrees(tokens):
    row = case(tokens, keys=12, values=20)
    args = batch([row], torch.float32)
    out = k3.kda_prefill(*args)
    want, state = onnx_attention(row)
    assert worst(out, want) < 5e-6
    assert worst(args[5][1], state) < 5e-6


def extreme(kind, tokens):
    """Rows that leave the range of float32 when exponents are not kept in bounds."""
    row = case(tokens, 3)
    if kind == "at the bound":
        return row._replace(g=torch.full_like(row.g, -5.0))
    if kind == "no decay":
        return row._replace(g=torch.zeros_like(row.g))
    if kind == "parallel keys":
        k = F.normalize(row.k[:1] + 1e-3 * row.k, dim=-1)
        return row._replace(k=k, g=row.g * 1e-3, beta=torch.full_like(row.beta, 1 - 1e-6))
    if kind == "beta near 0":
        return row._replace(beta=torch.full_like(row.beta, 1e-30))
    if kind == "alternating":
        g = torch.full_like(row.g, -1e-6)
        g[::3] = -5.0
        return row._replace(g=g)
    f = {"raw +-30": 30.0, "raw +-1e4": 1e4}[kind] * torch.sign(row.v.sum(-1, keepdim=True)).expand_as(row.g)
    a_log = torch.full((row.g.shape[1],), 2.0, dtype=torch.float64)
    bias = torch.linspace(-50, 50, row.g[0].numel(), dtype=torch.float64)
    return row._replace(g=k3.kda_decay(f.contiguous(), a_log, bias, -5.0))


KINDS = ["at the bound", "no decay", "parallel keys", "beta near 0", "alternating", "raw +-30", "raw +-1e4"]


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_gates_stay_finite_and_near_the_recurrence(kind):
    rows = [extreme(kind, n) for n in (1, 15, 16, 17, 63, 64, 65)]
    for dtype, bound in ((torch.float32, 1e-5), (torch.float64, 1e-11)):
        args = batch(rows, dtype)
        assert errors(args, k3.kda_prefill(*args), rows) < bound


@pytest.mark.parametrize("kind", KINDS)
def test_errors_do_not_grow_over_many_chunks(kind):
    rows = [extreme(kind, 1500)]
    args = batch(rows, torch.float32)
    assert errors(args, k3.kda_prefill(*args), rows) < 1e-5


@pytest.mark.parametrize("step", [-6.0, -20.0, -1e3, -1e30, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_an_unbounded_gate_is_exact_where_factors_would_overflow(step, dtype):
    row = case(70, 5)
    sharp = torch.rand(row.g.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) < 0.5
    row = row._replace(g=torch.where(sharp, torch.full_like(row.g, step), -1e-3))
    rows = [row, Case(*(x[:9] for x in row[:5]), row.state)]
    args = batch(rows, dtype)
    assert errors(args, k3.kda_prefill(*args), rows) < (2e-6 if dtype == torch.float32 else 1e-12)


def test_no_decay_and_no_write_keep_the_state():
    row = case(100)
    row = row._replace(g=torch.zeros_like(row.g), beta=torch.zeros_like(row.beta))
    args = batch([row])
    k3.kda_prefill(*args)
    assert torch.equal(args[5][1], row.state)


@pytest.mark.parametrize("cut", [1, 16, 64, 100, 128])
def test_a_cut_row_continues_from_its_state(cut):
    row = case(150)
    whole, args = batch([row]), batch([row])
    want = k3.kda_prefill(*whole)
    first = k3.kda_prefill(*(x[:cut] for x in args[:5]), args[5], args[6], torch.tensor([0, cut]))
    second = k3.kda_prefill(*(x[cut:] for x in args[:5]), args[5], args[6], torch.tensor([0, 150 - cut]))
    assert worst(torch.cat([first, second]), want) < 1e-13
    assert worst(args[5][1], whole[5][1]) < 1e-13


def test_a_row_alone_on_the_chunk_grid_leaves_the_same_bits():
    row = case(192)
    longer, shorter = batch([row], torch.float32), batch([row], torch.float32)
    k3.kda_prefill(*longer)
    for cut in (64, 128):
        part = slice(cut - 64, cut)
        k3.kda_prefill(*(x[part] for x in shorter[:5]), shorter[5], shorter[6], torch.tensor([0, 64]))
    k3.kda_prefill(*(x[128:] for x in shorter[:5]), shorter[5], shorter[6], torch.tensor([0, 64]))
    assert torch.equal(longer[5][1], shorter[5][1])


def test_nothing_past_the_rows_is_read_and_no_other_slot_is_touched():
    rows = [case(n, n) for n in (5, 1, 65)]
    args = list(batch(rows))
    want = k3.kda_prefill(*batch(rows))
    args[:5] = [torch.cat([x, torch.full((7, *x.shape[1:]), torch.nan, dtype=x.dtype)]) for x in args[:5]]
    out = k3.kda_prefill(*args)
    assert torch.equal(out[:71], want)
    assert (out[71:] == 0).all()
    assert torch.isnan(args[5][[0, *range(4, SLOTS + 1)]]).all()


def test_packed_slices_transposed_states_and_gaps_are_as_good_as_dense():
    rows = [case(n, n) for n in (1, 9, 70, 1)]
    dense = batch(rows)
    want = k3.kda_prefill(*dense)
    q, k, v, g, beta, state, slots, cu = batch(rows)
    q, k, v, g = packed_heads([q, k, v, g])
    beta = torch.stack([beta, beta], 2)[..., 1]
    turned = state.transpose(2, 3).contiguous().transpose(2, 3)
    for pool in (gapped(state), turned):
        assert worst(k3.kda_prefill(q, k, v, g, beta, pool, slots, cu), want) < 1e-14
        assert worst(pool[slots], dense[5][slots]) < 1e-14
        if pool._base is not None and pool._base.dim() == 5:
            assert (pool._base[:, 1] == 0).all(), "the gaps of the pool were written"


def test_an_expanded_beta_and_gate_are_read_by_their_strides():
    row = case(40)
    args = list(batch([row]))
    args[3], args[4] = args[3][:1].expand_as(args[3]), args[4][:1].expand_as(args[4])
    dense = [a.contiguous() for a in batch([row])]
    dense[3], dense[4] = args[3].contiguous(), args[4].contiguous()
    assert torch.equal(k3.kda_prefill(*args), k3.kda_prefill(*dense))


def test_the_order_of_rows_changes_nothing():
    rows = [case(n, n) for n in (1, 3, 1, 70)]
    want = [recurrence(row) for row in rows]
    for order in itertools.permutations(range(4)):
        args = batch([rows[r] for r in order])
        out = k3.kda_prefill(*args)
        for place, r in enumerate(order):
            begin, end = args[7][place], args[7][place + 1]
            assert worst(out[begin:end], want[r][0]) < 1e-13
            assert worst(args[5][place + 1], want[r][1]) < 1e-13


def test_into_writes_its_rows_and_no_other():
    rows = [case(n, n) for n in (4, 1, 20)]
    args = batch(rows)
    out = torch.full((40, *rows[0].v.shape[1:]), 7.0, dtype=torch.float64)
    assert k3.kda_prefill_into(*args, out, 3) is None
    plain = batch(rows)
    assert torch.equal(out[3:28], k3.kda_prefill(*plain))
    assert torch.equal(args[5][args[6]], plain[5][plain[6]])
    assert (out[:3] == 7.0).all()
    assert (out[28:] == 7.0).all()


def test_many_rows_of_one_token_equal_many_single_calls():
    for keys, values in ((24, 16), (128, 128)):
        rows = [case(1, seed, keys=keys, values=values) for seed in range(6)]
        args = batch(rows)
        assert errors(args, k3.kda_prefill(*args), rows) < 1e-13


def test_decay_golden_values():
    f, bias = torch.tensor([0.0, 2.0, -3.0], dtype=torch.float64), torch.tensor([0.0, -1.0, 0.5])
    g = k3.kda_decay(f.view(1, 1, 3), torch.tensor([0.3], dtype=torch.float64), bias.double(), -5.0)
    want = torch.tensor([-2.5, -3.9705327, -0.1654864], dtype=torch.float64)
    torch.testing.assert_close(g.flatten(), want, rtol=0, atol=1e-7)
    alpha = torch.tensor([0.0820850, 0.0188634, 0.8474814], dtype=torch.float64)
    torch.testing.assert_close(g.exp().flatten(), alpha, rtol=0, atol=1e-7)


def test_the_unbounded_decay_is_softplus_at_every_size():
    f = torch.tensor([-800.0, -30, -1, 0, 6, 21, 800], dtype=torch.float64)
    g = k3.kda_decay(
        f.view(1, 1, 7), torch.zeros(1, dtype=torch.float64), torch.zeros(7, dtype=torch.float64), 0.0
    )
    torch.testing.assert_close(-g.flatten(), torch.logaddexp(f, torch.zeros_like(f)), rtol=1e-14, atol=0)


def test_decay_is_per_head_and_bias_per_channel():
    f = torch.zeros(1, 2, 3, dtype=torch.float64)
    a_log = torch.tensor([0.0, 1.0], dtype=torch.float64)
    bias = torch.arange(6, dtype=torch.float64)
    want = -5 * torch.sigmoid(torch.exp(a_log)[:, None] * bias.view(2, 3))
    torch.testing.assert_close(k3.kda_decay(f, a_log, bias, -5.0)[0], want)
