"""Router, experts and finalize against loops that name every token and expert."""

import pytest
import torch
from k3compile.kernels import mxfp4
from k3compile.kernels.situ import situ_wide
from kda_oracle import worst
from torch.nn import functional as F

k3 = torch.ops.k3


# --- the router ---


def test_weights_are_the_renormalised_sigmoids_without_the_bias():
    x, gate, bias = torch.randn(7, 16).double(), torch.randn(12, 16).double(), torch.randn(12).double()
    weights, ids = k3.route(x, gate, bias, 3, 2.446, True)
    scores = torch.sigmoid(x @ gate.T)
    for t in range(7):
        best = sorted(range(12), key=lambda e: -(scores[t, e] + bias[e]).item())[:3]
        assert ids[t].tolist() == best
        torch.testing.assert_close(weights[t], scores[t, best] / scores[t, best].sum() * 2.446)
    plain, _ = k3.route(x, gate, bias, 3, 1.0, False)
    torch.testing.assert_close(plain, scores.gather(1, ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_equal_scores_go_to_the_lower_expert(dtype):
    x = torch.randn(5, 32).to(dtype)
    _, ids = k3.route(x, torch.zeros(896, 32).to(dtype), torch.zeros(896), 16, 1.0, True)
    assert ids.tolist() == [list(range(16))] * 5


def test_a_tie_for_the_last_place_goes_to_the_lower_expert():
    bias = torch.zeros(896)
    bias[100:115] = 1.0  # fifteen ahead; place 16 is a tie of all others
    _, ids = k3.route(torch.randn(3, 8), torch.zeros(896, 8), bias, 16, 1.0, True)
    assert ids.tolist() == [[*range(100, 115), 0]] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_routed_alike_in_any_batch_at_any_place(dtype):
    source = torch.Generator().manual_seed(0)
    gate = torch.randn(896, 64, generator=source)
    gate[1::2] = gate[0::2]  # every expert has a twin: ties everywhere
    gate, row = gate.to(dtype), torch.randn(1, 64, generator=source).to(dtype)
    bias = torch.randn(448, generator=source).repeat_interleave(2)
    want = k3.route(row, gate, bias, 16, 1.0, True)
    for size in (1, 2, 3, 7, 16, 33, 64):
        batch = torch.randn(size, 64, generator=source).to(dtype)
        for place in {0, size // 2, size - 1}:
            batch[place] = row
            weights, ids = k3.route(batch, gate, bias, 16, 1.0, True)
            assert torch.equal(ids[place], want[1][0])
            assert torch.equal(weights[place], want[0][0])
            assert all(len(set(chosen)) == 16 for chosen in ids.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_equal_experts_tie_however_the_products_were_summed(dtype):
    source = torch.Generator().manual_seed(0)
    gate = torch.randn(1, 24, generator=source).to(dtype).repeat(10, 1)
    for rows in (1, 2, 3, 9, 17):
        x = torch.randn(rows, 24, generator=source).to(dtype)
        _, ids = k3.route(x, gate, torch.zeros(10), 3, 1.0, True)
        assert ids.tolist() == [[0, 1, 2]] * rows


@pytest.mark.parametrize("experts", [5, 8, 17, 896])
def test_no_score_depends_on_how_many_rows_are_routed_together(experts):
    # float32 sigmoids differ in the last bit between whole vectors and the few elements left over
    source = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(rows, 24, generator=source) for rows in (33, experts))
    gate[-1] = gate[0]  # twins, one of them among the left over
    bias, top_k = torch.zeros(experts), min(experts, 16)
    weights, ids = k3.route(x, gate, bias, top_k, 2.446, False)
    for rows in range(1, 33):
        fewer, chosen = k3.route(x[:rows], gate, bias, top_k, 2.446, False)
        assert torch.equal(chosen, ids[:rows])
        assert torch.equal(fewer, weights[:rows])
        both = (chosen == experts - 1).any(1)
        assert (chosen[both] == 0).any(1).all(), "the twin with the higher number came first"


def test_a_row_of_nan_has_its_written_result_and_harms_no_other():
    x, gate, bias = torch.randn(4, 16), torch.randn(12, 16), torch.randn(12)
    want = k3.route(x, gate, bias, 3, 1.0, True)
    x[2] = torch.nan
    weights, ids = k3.route(x, gate, bias, 3, 1.0, True)
    assert ids[2].tolist() == [0, 1, 2]
    assert torch.isnan(weights[2]).all()
    others = [0, 1, 3]
    assert torch.equal(weights[others], want[0][others])
    assert torch.equal(ids[others], want[1][others])


# --- the experts ---


def dense_loop(z, ids, w1, w3, w2, beta, linear_beta):
    """rows[t][j] in float64: one token, one expert at a time; zero where the expert is not here."""
    out = torch.zeros(*ids.shape, z.shape[1], dtype=torch.float64)
    for t in range(len(z)):
        for j, e in enumerate(ids[t].tolist()):
            if e >= 0:
                out[t, j] = w2[e] @ situ_wide(w1[e] @ z[t], w3[e] @ z[t], beta, linear_beta)
    return out


def experts(count=6, latent=64, inner=32, seed=0):
    source = torch.Generator().manual_seed(seed)
    shapes = (count, inner, latent), (count, inner, latent), (count, latent, inner)
    return [torch.randn(s, generator=source, dtype=torch.float64) / s[-1] ** 0.5 for s in shapes]


IDS = {
    "one token": [[4, 1]],
    "one expert": [[3, 3], [3, 3], [3, 3]],
    "spread": [[0, 5], [1, 4], [2, 3], [5, 0], [4, 4]],
    "holes": [[0, -1], [-1, -1], [5, 2], [-1, 3]],
    "only holes": [[-1, -1], [-1, -1]],
}


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 2e-6)], ids=str)
@pytest.mark.parametrize("kind", IDS)
def test_rows_and_idx_name_each_tokens_experts(kind, dtype, bound):
    ids = torch.tensor(IDS[kind])
    z = torch.randn(len(ids), 64, dtype=torch.float64).to(dtype)
    packed = [part for w in experts() for part in mxfp4.pack(w)]
    dense = [mxfp4.unpack(*packed[i : i + 2], torch.float64) for i in (0, 2, 4)]
    want = dense_loop(z.double(), ids, *dense, 4.0, 25.0)
    for rows, idx in (
        k3.experts_unfinalized(z, ids, *packed, 4.0, 25.0),
        k3.experts_unfinalized_dense(z, ids, *(w.to(dtype) for w in dense), 4.0, 25.0),
    ):
        assert rows.shape == (ids.numel(), 64)
        assert idx.dtype == torch.int32
        assert torch.equal(idx < 0, ids < 0)
        named = idx[idx >= 0].tolist()
        assert len(set(named)) == len(named)
        for t, j in (ids >= 0).nonzero().tolist():
            assert worst(rows[idx[t, j]], want[t, j]) < bound
        unnamed = sorted(set(range(len(rows))) - set(named))
        assert (rows[unnamed] == 0).all()


@pytest.mark.parametrize("quantised", [True, False], ids=["packed", "dense"])
def test_ids_may_have_any_layout(quantised):
    packed = [part for w in experts() for part in mxfp4.pack(w)]
    op = k3.experts_unfinalized if quantised else k3.experts_unfinalized_dense
    weights = packed if quantised else [w.float() for w in experts()]
    z, ids = torch.randn(5, 64), torch.tensor(IDS["spread"])
    want = op(z, ids, *weights, 4.0, 25.0)
    for odd in (ids.t().contiguous().t(), ids.repeat_interleave(2, 1)[:, ::2], ids.to(torch.int32)):
        rows, idx = op(z, odd, *weights, 4.0, 25.0)
        assert torch.equal(rows, want[0])
        assert torch.equal(idx, want[1])
        torch.library.opcheck(op.default, (z, odd, *weights, 4.0, 25.0), test_utils=("test_faketensor",))


def test_rows_are_grouped_by_expert():
    ids = torch.tensor([[5, 0], [1, 5], [0, 1]])
    _, idx = k3.experts_unfinalized_dense(torch.randn(3, 64), ids, *(w.float() for w in experts()), 0.0, 0.0)
    by_row = sorted((i, e) for i, e in zip(idx.flatten().tolist(), ids.flatten().tolist()))
    assert [e for _, e in by_row] == [0, 0, 1, 1, 5, 5]


def test_only_experts_present_are_decoded(monkeypatch):
    from k3compile.kernels import moe

    calls = []
    unpack = moe.unpack
    monkeypatch.setattr(moe, "unpack", lambda *a: calls.append(1) or unpack(*a))
    packed = [part for w in experts() for part in mxfp4.pack(w)]
    k3.experts_unfinalized(torch.randn(4, 64), torch.tensor([[2, 4]] * 4), *packed, 4.0, 25.0)
    assert len(calls) == 3 * 2


def test_an_expert_that_does_not_exist_is_an_error_of_ours():
    packed = [part for w in experts() for part in mxfp4.pack(w)]
    with pytest.raises(AssertionError, match="expert 6 of 6"):
        k3.experts_unfinalized(torch.randn(1, 64), torch.tensor([[6, 0]]), *packed, 4.0, 25.0)


def test_bfloat16_rounds_the_inner_activation_and_the_row():
    z, w = torch.randn(1, 64).bfloat16(), [x.bfloat16() for x in experts(count=1, inner=256)]
    rows, _ = k3.experts_unfinalized_dense(z, torch.tensor([[0]]), *w, 4.0, 25.0)
    w1, w3, w2 = (x[0].float() for x in w)
    inner = situ_wide(F.linear(z.float(), w1), F.linear(z.float(), w3), 4.0, 25.0)
    assert torch.equal(rows, F.linear(inner.bfloat16().float(), w2).bfloat16())
    assert not torch.equal(rows, F.linear(inner, w2).bfloat16()), "the sample does not tell the two apart"


# --- finalize ---


def test_finalize_weighs_and_sums_the_named_rows():
    rows, weights = torch.randn(9, 5).double(), torch.rand(4, 3).double()
    idx = torch.tensor([[0, 8, 3], [1, -1, 1], [-1, -1, -1], [-1, 2, 0]], dtype=torch.int32)
    want = torch.zeros(4, 5, dtype=torch.float64)
    for t in range(4):
        for j in range(3):
            if idx[t, j] >= 0:
                want[t] += weights[t, j] * rows[idx[t, j]]
    torch.testing.assert_close(k3.finalize(rows, weights, idx), want)


def test_a_hole_reads_neither_a_row_nor_its_weight():
    rows, weights = torch.randn(4, 5), torch.rand(2, 2)
    idx = torch.tensor([[2, -1], [-1, 1]], dtype=torch.int32)
    want = k3.finalize(rows, weights, idx)
    rows[[0, 3]], weights[0, 1], weights[1, 0] = torch.nan, torch.nan, torch.inf
    assert torch.equal(k3.finalize(rows, weights, idx), want)
    nothing = k3.finalize(rows[:0], weights, torch.full((2, 2), -1, dtype=torch.int32))
    assert nothing.tolist() == [[0.0] * 5] * 2


def test_finalize_rounds_once():
    rows, weights = torch.randn(40, 8).bfloat16(), torch.rand(5, 8)
    idx = torch.arange(40, dtype=torch.int32).view(5, 8)
    want = (rows.double().view(5, 8, 8) * weights.double()[..., None]).sum(1)
    assert worst(k3.finalize(rows, weights, idx), want) < 2**-8


def test_experts_of_two_ranks_add_up():
    ids, z = torch.tensor([[0, 5], [4, 1], [3, 2]]), torch.randn(3, 64, dtype=torch.float64)
    w, weights = experts(), torch.rand(3, 2, dtype=torch.float64)

    def partial(ids, w):
        rows, idx = k3.experts_unfinalized_dense(z, ids, *w, 4.0, 25.0)
        return k3.finalize(rows, weights, idx)

    low = torch.where(ids < 3, ids, -1)
    high = torch.where(ids >= 3, ids - 3, -1)
    halves = partial(low, [x[:3] for x in w]) + partial(high, [x[3:] for x in w])
    torch.testing.assert_close(halves, partial(ids, w))
