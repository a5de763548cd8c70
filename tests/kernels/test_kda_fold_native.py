"""States after verified rows, in C++: the meaning's numbers, and no state beside them."""

import pytest
import torch
from k3compile.kernels import kda_verify_native
from k3compile.kernels.kda_chunk import Inputs
from k3compile.kernels.kda_fold_native import commit_states, leave_states
from k3compile.kernels.kda_verify import kda_commit
from k3compile.kernels.kda_verify_states import leave_in_place
from k3compile.kernels.native import ISAS, build
from k3compile.kernels.samples import Draw, gapped
from lanes import thinned

RANK = list(ISAS)
RUNNABLE = [isa for isa in RANK[RANK.index(build.best_isa()) :] if isa != "portable"]
SHAPES = [(3, 20, 12), (2, 128, 64), (2, 5, 3)]  # H, K, V
MOVES = [(1, 2, 5), (1, 3, 1), (2, 0, 6), (3, 5, 3)]  # a checkpoint on the way, a copy, all rows of a slot


@pytest.fixture(params=thinned(RUNNABLE, 1))
def isa(request):
    if reason := build.unavailable("kda_fold", request.param):
        pytest.skip(reason)
    return request.param


def pools(heads, keys, values, layers=2, seed=0):
    """state [L, 8, H, V, K] and records of five rows for the first five slots."""
    draw, shape = Draw(torch.float32, seed), (layers, 5, 5, heads)
    u, k = draw.normal(*shape, values), draw.unit(*shape, keys)
    return draw.normal(layers, 8, heads, values, keys), u, k, -3.0 * draw.fraction(*shape, keys)


def formula(state, u, k, g):
    """The commit of MOVES, a row at a time in float64."""
    before, after = state.double(), state.double()
    for slot, count, into in MOVES:
        s = before[:, slot]
        for i in range(count):
            decay, key = g[:, slot, i].double().exp(), k[:, slot, i].double()
            s = s * decay.unsqueeze(2) + u[:, slot, i].double().unsqueeze(3) * key.unsqueeze(2)
        after[:, into] = s
    return after


def meaning(state, u, k, g):
    state, window, x = state.clone(), torch.zeros(len(state), 8, 3, 4), torch.zeros(len(state), 5, 5, 4)
    kda_commit.meaning(state, window, u, k, g, x, *torch.tensor(MOVES).unbind(1))
    return state


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_commit_is_as_close_to_the_formula_as_the_meaning(isa, shape):
    squares = torch.zeros(2, dtype=torch.float64)
    for seed in range(20):
        given = pools(*shape, seed=seed)
        want, state = formula(*given), given[0].clone()
        commit_states(state, *given[1:], MOVES, isa)
        for i, found in enumerate((state, meaning(*given))):
            squares[i] += (found.double() - want).square().sum()
    assert squares[0].sqrt() <= 1.1 * squares[1].sqrt(), (squares[0] / squares[1]).sqrt()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_commit_reads_and_writes_its_slots_alone(isa, threads):
    given = pools(*SHAPES[0])
    want = given[0].clone()
    commit_states(want, *given[1:], MOVES, isa)
    state, records = gapped(given[0].transpose(0, 1)).transpose(0, 1), [gapped(r) for r in given[1:]]
    state[:, [0, 4, 7]] = torch.nan
    for r in records:
        r[:, [0, 4]] = torch.nan
        for slot, most in ((1, 3), (2, 0), (3, 5)):
            r[:, slot, most:] = torch.nan
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        commit_states(state, *records, MOVES, isa)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(state[:, [1, 2, 3, 5, 6]], want[:, [1, 2, 3, 5, 6]])
    assert torch.isnan(state[:, [0, 4, 7]]).all()
    assert torch.equal(state[:, 6], given[0][:, 2]), "nothing accepted is a copy"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_states_of_every_row_are_the_meanings(isa, shape):
    heads, keys, values = shape
    draw = Draw(torch.float32)
    k, g = draw.unit(9, heads, keys), -3.0 * draw.fraction(9, heads, keys)
    u, state = draw.normal(2, 5, heads, values), draw.normal(9, heads, values, keys)
    u[1, 3:] = torch.nan
    inputs, into = Inputs(k, k, u[0], g, u[0]), [[4, 1, 5, 6, 7], [2, 8, 3]]  # both homes are targets too
    got, want = state.clone(), state.clone()
    leave_states(inputs, u, got, [1, 2], [0, 5], into, isa)
    for r, (home, begin) in enumerate(((1, 0), (2, 5))):
        room = torch.cat([state[home][None], state.new_empty(5, heads, values, keys)])
        leave_in_place(inputs, u[r : r + 1], room, [0], [begin], [list(range(1, len(into[r]) + 1))])
        want[into[r]] = room[1 : len(into[r]) + 1]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert torch.equal(got[0], state[0])


def test_the_op_moves_states_and_windows_as_its_meaning():
    for args, again in zip(kda_commit.each_sample(), kda_commit.each_sample(), strict=True):
        if reason := kda_verify_native.commit_objection(*args):
            pytest.skip(reason)
        kda_verify_native.commit_native(*args)
        kda_commit.meaning(*again)
        for a, b in zip(args, again, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_commit_objects_to_what_it_cannot_do():
    args = list(list(kda_commit.each_sample())[1])
    said = kda_verify_native.commit_objection
    if reason := said(*args):
        pytest.skip(reason)
    assert said(*(a.to("meta") for a in args)) == "meta tensors"
    assert said(args[0].double(), *args[1:]) == "some arguments are torch.float64, not float32"
    assert said(args[0].mT.contiguous().mT, *args[1:]) == "channels of a pool are not side by side"
