"""KDA's chunks in C++: the meaning's numbers on every instruction set, and a row that is its own affair."""

import pytest
import torch
from k3compile.kernels import kda_chunk_native
from k3compile.kernels.kda import kda_prefill
from k3compile.kernels.kda_chunk import Inputs
from k3compile.kernels.kda_chunk_native import Row, whole_rows
from k3compile.kernels.native import ISAS, build
from k3compile.kernels.samples import Draw, gapped, packed_heads, row_bounds
from kda_oracle import case, recurrence, worst
from lanes import thinned
from torch.nn import functional as F

RANK = list(ISAS)
RUNNABLE = [isa for isa in RANK[RANK.index(build.best_isa()) :] if isa != "portable"]
MIXED = [130, 5, 64, 9, 17, 2, 33]


@pytest.fixture(params=thinned(RUNNABLE, 1))
def isa(request):
    if reason := build.unavailable("kda_chunk", request.param):
        pytest.skip(reason)
    return request.param


def drawn(lengths, heads, keys, values, decay=5.0, seed=0):
    """Inputs, a pool whose slots 1, 2, .. are the rows', and the rows."""
    draw, tokens = Draw(torch.float32, seed), sum(lengths)
    q, k = draw.unit(tokens, heads, keys) * keys**-0.5, draw.unit(tokens, heads, keys)
    v, beta = draw.normal(tokens, heads, values), draw.fraction(tokens, heads)
    g = -decay * draw.fraction(tokens, heads, keys)
    return Inputs(q, k, v, g, beta), draw.normal(len(lengths) + 3, heads, values, keys), rows_of(lengths)


def rows_of(lengths):
    bounds = row_bounds(lengths).tolist()
    return [Row(r + 1, bounds[r], n) for r, n in enumerate(lengths)]


def run(inputs, state, rows, isa, **how):
    """(o, state) from a copy of the state."""
    state, out = state.clone(), torch.zeros(len(inputs.v), *inputs.v.shape[1:])
    whole_rows(inputs, state, rows, out, 0, isa=isa, **how)
    return out, state


def meaning(inputs, state, rows, dtype):
    state = state.to(dtype, copy=True)
    slots = torch.tensor([row.slot for row in rows])
    cu = row_bounds([row.count for row in rows])
    return kda_prefill.meaning(*(x.to(dtype) for x in inputs), state, slots, cu), state


@pytest.mark.parametrize("decay", [0.1, 5.0, 30.0])
@pytest.mark.parametrize(
    ("lengths", "shape"),
    [(MIXED, (3, 20, 12)), ([100, 9, 16], (2, 128, 128)), ([70, 40], (3, 16, 16)), ([70, 9, 3], (3, 17, 33))],
    ids=str,
)
def test_it_is_as_close_to_float64_as_the_meaning(isa, lengths, shape, decay):
    squares = torch.zeros(2, 2, dtype=torch.float64)  # of errors: ours and the meaning's, of o and of states
    for seed in range(6):
        given = drawn(lengths, *shape, decay, seed)
        want = meaning(*given, torch.float64)
        for i, found in enumerate((run(*given, isa), meaning(*given, torch.float32))):
            for j in range(2):
                squares[i, j] += (found[j].double() - want[j]).square().sum()
    assert (squares[0].sqrt() <= 1.1 * squares[1].sqrt()).all(), (squares[0] / squares[1]).sqrt()


def oracle(row, isa):
    """The worse of both errors of a case run alone, against the recurrence."""
    inputs = Inputs(*(x.float() for x in row[:5]))
    out, state = run(inputs, row.state.float().unsqueeze(0), [Row(0, 0, len(row.q))], isa)
    o, s = recurrence(row)
    return max(worst(out, o), worst(state[0], s))


@pytest.mark.parametrize("tokens", [2, 15, 16, 17, 63, 64, 65, 200])
def test_rows_of_every_length_equal_the_recurrence(isa, tokens):
    assert oracle(case(tokens), isa) < 2e-6


@pytest.mark.parametrize(("keys", "values"), [(8, 40), (40, 8), (1, 1), (31, 65), (128, 100)])
def test_keys_and_values_may_have_any_width(isa, keys, values):
    assert oracle(case(70, keys=keys, values=values), isa) < 2e-6


@pytest.mark.parametrize("step", [-6.0, -20.0, -1e3, -1e30, -torch.inf])
def test_an_unbounded_gate_is_exact_where_factors_would_overflow(isa, step):
    row = case(70, 5)
    sharp = torch.rand(row.g.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    assert oracle(row._replace(g=torch.where(sharp, step, -1e-3).double()), isa) < 2e-6


@pytest.mark.parametrize("kind", ["at the bound", "no decay", "parallel keys", "alternating"])
def test_errors_do_not_grow_over_many_chunks(isa, kind):
    row = case(600, 3)
    if kind == "parallel keys":
        k = F.normalize(row.k[:1] + 1e-3 * row.k, dim=-1)
        row = row._replace(k=k, g=row.g * 1e-3, beta=torch.full_like(row.beta, 1 - 1e-6))
    else:
        g = torch.full_like(row.g, {"at the bound": -5.0, "no decay": 0.0, "alternating": -1e-6}[kind])
        if kind == "alternating":
            g[::3] = -5.0
        row = row._replace(g=g)
    assert oracle(row, isa) < 1e-5


def test_no_decay_and_no_write_leave_the_state_as_it_was(isa):
    inputs, state, rows = drawn([100, 3], 3, 20, 12)
    still = inputs._replace(g=torch.zeros_like(inputs.g), beta=torch.zeros_like(inputs.beta))
    assert torch.equal(run(still, state, rows, isa)[1], state)


def test_a_row_does_not_depend_on_company_threads_or_a_checkpoint(isa):
    given = inputs, state, rows = drawn([130, 64, 9, 17], 3, 20, 40)
    before = torch.get_num_threads()
    together = run(*given, isa)
    try:
        for threads in (2, 5):
            torch.set_num_threads(threads)
            again = run(*given, isa)
            assert torch.equal(again[0], together[0])
            assert torch.equal(again[1], together[1])
    finally:
        torch.set_num_threads(before)
    for row in rows:
        for offset in (0, row.count // 2):
            alone = run(inputs, state, [row._replace(offset=offset, into=6)], isa)
            tokens = slice(row.begin, row.begin + row.count)
            assert torch.equal(alone[0][tokens], together[0][tokens])
            assert torch.equal(alone[1][row.slot], together[1][row.slot])


@pytest.mark.parametrize("offset", [2, 15, 16, 17, 63, 64, 65, 66, 100, 128, 129, 149, 150])
def test_a_checkpoint_has_the_bits_of_a_run_that_stops_there(isa, offset):
    inputs, state, _ = drawn([150], 3, 20, 12)
    whole = run(inputs, state, [Row(1, 0, 150, offset, 2)], isa)[1]
    stopped = run(inputs, state, [Row(1, 0, offset)], isa)[1]
    assert torch.equal(whole[2], stopped[1])
    assert torch.equal(whole[[0, 3]], state[[0, 3]])


def test_a_row_cut_on_the_chunk_grid_goes_on_with_the_same_bits(isa):
    inputs, state, rows = drawn([192], 3, 20, 12)
    want = run(inputs, state, rows, isa)
    out, pool = torch.zeros_like(want[0]), state.clone()
    for begin, count in ((0, 64), (64, 128)):
        whole_rows(inputs, pool, [Row(1, begin, count)], out, 0, isa=isa)
    assert torch.equal(out, want[0])
    assert torch.equal(pool, want[1])


def test_strided_rows_and_a_pool_with_gaps_are_read_where_they_are(isa):
    inputs, state, rows = drawn([70, 9], 3, 20, 12)
    want = run(inputs, state, rows, isa)
    q, k, v = packed_heads([inputs.q, inputs.k, inputs.v])
    columns = inputs.g.permute(2, 0, 1).contiguous().permute(1, 2, 0)  # channels are no neighbours
    beta = inputs.beta.t().contiguous().t()
    pool, out = gapped(state), torch.zeros(12, 79, 3).permute(1, 2, 0)
    whole_rows(Inputs(q, k, v, columns, beta), pool, rows, out, 0, isa=isa)
    assert torch.equal(out, want[0])
    assert torch.equal(pool, want[1])


def inside(x, *margins):
    """The same values amid NaN, and the room they lie in."""
    room = torch.full([n + 2 * m for n, m in zip(x.shape, margins)], torch.nan, dtype=x.dtype)
    inner = room[tuple(slice(m, m + n) for n, m in zip(x.shape, margins))]
    inner.copy_(x)
    return inner, room


@pytest.mark.parametrize("keys", [5, 16, 20])
@pytest.mark.parametrize("values", [12, 70])
def test_nothing_beside_its_rows_is_read_or_written(isa, keys, values):
    inputs, state, _ = drawn([30, 70, 9], 3, keys, values)
    rows = [Row(1, 2, 20), Row(3, 30, 65, 40, 4)]  # the tokens between and after them are nobody's
    used = torch.zeros(109, dtype=torch.bool)
    used[2:22] = used[30:95] = True
    want = run(inputs, state, rows, isa)
    poisoned = [
        inside(x.masked_fill(~used.view(-1, *[1] * (x.dim() - 1)), torch.nan), 2, 8, 8) for x in inputs[:4]
    ]
    beta = inside(inputs.beta.masked_fill(~used[:, None], torch.nan), 2, 8)
    state[[0, 2, 5]] = torch.nan
    pool, room = inside(state, 1, 1, 8, 8)
    before = room.clone()
    out = torch.full((112, 3, values), 7.0)
    whole_rows(Inputs(*(x for x, _ in poisoned), beta[0]), pool, rows, out, 1, isa=isa)
    assert torch.equal(out[1:-2][used], want[0][used])
    assert (out[1:-2][~used] == 7.0).all()
    assert (out[[0, -2, -1]] == 7.0).all()
    assert torch.equal(pool[[1, 3, 4]], want[1][[1, 3, 4]])
    pool[[1, 3, 4]] = before[1:-1, 1:-1, 8:-8, 8:-8][[1, 3, 4]]
    assert torch.equal(room.view(torch.int32), before.view(torch.int32))


def test_no_rows_are_no_work(isa):
    inputs, state, _ = drawn([], 3, 20, 12)
    assert torch.equal(run(inputs, state, [], isa)[1], state)


def test_four_lanes_are_left_to_the_meaning(monkeypatch):
    monkeypatch.setattr(kda_chunk_native, "best_isa", lambda: "portable")
    assert kda_chunk_native.cannot() == "vectors of four lanes gain nothing"
    monkeypatch.setattr(kda_chunk_native, "best_isa", lambda: "avx2")
    monkeypatch.setattr(build, "_LOADED", {})
    monkeypatch.setattr(build, "compilers", list)
    assert "no C++ compiler" in kda_chunk_native.cannot()
