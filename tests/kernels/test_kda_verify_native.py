"""Verify ops in C++: the meaning's outputs, records and states, and nothing beside them."""

import pytest
import torch
from compiled import Compiled
from k3compile.kernels import kda_native, kda_verify_native
from k3compile.kernels.kda_verify import kda_verify, kda_verify_into
from k3compile.kernels.kda_verify_states import kda_verify_states, kda_verify_states_into
from k3compile.kernels.native import build
from k3compile.kernels.samples import Draw, row_bounds
from k3compile.passes.lower import Lower

SHAPES = [(3, 20, 12), (2, 128, 128), (8, 16, 16)]
LENGTHS = [9, 2, 0, 5, 1]
OPS = {o.name: o for o in (kda_verify, kda_verify_into, kda_verify_states, kda_verify_states_into)}


def call(name, lengths=LENGTHS, shape=SHAPES[0], seed=0, decay=5.0):
    """Arguments of one of the four ops; rows live in slots 1, 2, .., slots of nobody are NaN."""
    draw, (heads, keys, values), tokens, rows = Draw(torch.float32, seed), shape, sum(lengths), len(lengths)
    q, k = draw.unit(tokens, heads, keys) * keys**-0.5, draw.unit(tokens, heads, keys)
    v, beta = draw.normal(tokens, heads, values), draw.fraction(tokens, heads)
    g = -decay * draw.fraction(tokens, heads, keys)
    state = torch.full((rows * 10 + 2, heads, values, keys), torch.nan)
    state[1 : rows + 1] = draw.normal(rows, heads, values, keys)
    args = [q, k, v, g, beta, state, torch.arange(1, rows + 1), row_bounds(lengths)]
    if "states" in name:
        own = torch.arange(1, rows + 1).view(rows, 1)
        args.append(torch.cat([own, torch.arange(rows + 1, rows * 9 + 1).view(rows, 8)], 1))
    else:
        args += [torch.full((rows + 2, 9, heads, n), 7.0) for n in (values, keys, keys)]
    return args + ([torch.full((tokens + 5, heads, values), 7.0), 2] if "into" in name else [])


def results(fn, args):
    """All tensors after a call, the returned one first."""
    got = fn(*args)
    return [x for x in ([] if got is None else [got]) + args if isinstance(x, torch.Tensor)]


def native(name, args):
    implementation = OPS[name].implementations["native"]
    if reason := implementation.objection(*args):
        pytest.skip(reason)
    return results(implementation.fn, args)


@pytest.mark.parametrize("lengths", [[], [0], [1], LENGTHS, [4] * 5], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_outputs_records_and_states_are_the_meanings(name, lengths):
    got, want = native(name, call(name, lengths)), results(OPS[name].meaning, call(name, lengths))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["kda_verify", "kda_verify_states"])
def test_it_is_as_close_to_float64_as_the_meaning(name, shape):
    squares = torch.zeros(
        2, 2, dtype=torch.float64
    )  # of errors: ours and the meaning's; of o, and of u or states
    which = 0, 6 if name == "kda_verify_states" else 9
    for seed in range(10):
        given = [call(name, LENGTHS, shape, seed) for _ in range(3)]
        wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in given[2]]
        want = results(OPS[name].meaning, wide)
        for i, found in enumerate((native(name, given[0]), results(OPS[name].meaning, given[1]))):
            for j, at in enumerate(which):
                squares[i, j] += (found[at].double() - want[at]).nan_to_num().square().sum()
    assert (squares[0].sqrt() <= 1.1 * squares[1].sqrt()).all(), (squares[0] / squares[1]).sqrt()


def test_the_four_ops_give_the_same_bits():
    plain = native("kda_verify", call("kda_verify"))
    into = native("kda_verify_into", call("kda_verify_into"))
    states = native("kda_verify_states", call("kda_verify_states"))
    both = native("kda_verify_states_into", call("kda_verify_states_into"))
    assert torch.equal(into[-1][2:-3], plain[0])
    assert torch.equal(states[0], plain[0])
    assert torch.equal(both[-1][2:-3], plain[0])
    assert torch.equal(both[5].nan_to_num(7.0), states[6].nan_to_num(7.0))
    for a, b in zip(into[8:11], plain[9:12], strict=True):
        assert torch.equal(a, b)


def test_the_state_is_only_read_and_keys_and_decays_are_kept_as_they_came():
    args = call("kda_verify")
    before = [x.clone() for x in args]
    native("kda_verify", args)
    assert torch.equal(args[5].nan_to_num(7.0), before[5].nan_to_num(7.0))
    begin = 0
    for slot, n in enumerate(LENGTHS, 1):
        for rec, given in ((args[9], args[1]), (args[10], args[3])):
            assert torch.equal(rec[slot, :n], given[begin : begin + n])
        begin += n


def test_nothing_beside_its_rows_is_written():
    args = native("kda_verify_into", call("kda_verify_into"))
    for rec in args[8:11]:
        assert (rec[[0, -1]] == 7.0).all()
        for slot, n in enumerate(LENGTHS, 1):
            assert (rec[slot, n:] == 7.0).all()
    assert (args[-1][:2] == 7.0).all()
    assert (args[-1][-3:] == 7.0).all()
    given = call("kda_verify_states")
    native("kda_verify_states", given)
    used = [given[8][r, i].item() for r, n in enumerate(LENGTHS) for i in range(n)]
    others = [s for s in range(len(given[5])) if s not in used and s not in given[6]]
    assert torch.isnan(given[5][others]).all()
    assert torch.isfinite(given[5][used]).all()


def test_records_whose_channels_are_no_neighbours_are_written_all_the_same():
    want, args = native("kda_verify", call("kda_verify")), call("kda_verify")
    args[8:] = [r.mT.contiguous().mT for r in args[8:]]
    got = native("kda_verify", args)
    for a, b in zip(got[9:], want[9:], strict=True):
        assert torch.equal(a, b)


def test_a_row_does_not_depend_on_threads_or_company():
    want = native("kda_verify_states", call("kda_verify_states"))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        again = native("kda_verify_states", call("kda_verify_states"))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(again[0], want[0])
    assert torch.equal(again[6].nan_to_num(7.0), want[6].nan_to_num(7.0))
    args = call("kda_verify_states")
    alone = [x[:9] for x in args[:5]] + [args[5], args[6][:1], torch.tensor([0, 9]), args[8][:1]]
    got = native("kda_verify_states", alone)
    assert torch.equal(got[0], want[0][:9])
    assert torch.equal(args[5][args[8][0]], want[6][args[8][0]])


@pytest.mark.parametrize("name", OPS)
def test_a_row_that_is_too_long_is_refused_before_anything_is_written(name):
    args = call(name, [10])
    before = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
    with pytest.raises(ValueError, match="a verify row has 10 tokens"):
        native(name, args)
    for a, b in zip(args, before):
        assert not isinstance(a, torch.Tensor) or torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))


def test_it_objects_to_what_it_cannot_do(monkeypatch):
    args, said = call("kda_verify"), kda_verify_native.objection
    if reason := said(*args):
        pytest.skip(reason)
    assert said(*(a.to("meta") for a in args)) == "meta tensors"
    assert "torch.float64, not float32" in said(args[0].double(), *args[1:])
    turned = args[5].mT.contiguous().mT
    assert said(*args[:5], turned, *args[6:]) == "key channels of the state are not side by side"
    monkeypatch.setattr(kda_verify_native, "cannot", lambda: "four lanes")
    assert said(*args) == "four lanes"


@pytest.mark.parametrize("name", OPS)
def test_cached_code_runs_where_nothing_can_be_compiled(name, monkeypatch):
    want = results(OPS[name].meaning, call(name))
    monkeypatch.setattr(build, "_LOADED", {})
    monkeypatch.setattr(build, "compilers", list)
    build.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="the reference computes it"):
        got = results(OPS[name].implementations["native"].fn, call(name))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))


@pytest.mark.parametrize("name", OPS)
def test_it_is_chosen_and_a_report_says_so(name):
    args, again = call(name), call(name)
    if reason := OPS[name].implementations["native"].objection(*args):
        pytest.skip(reason)
    compiled = Compiled(lambda *a: OPS[name].overload(*a), (Lower(),))
    got, want = results(compiled, args), results(OPS[name].meaning, again)
    (remark,) = compiled.remarks(name="lower")
    assert remark.reason == f"computed by native, {kda_native.NOTE}"
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)
