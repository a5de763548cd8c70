"""The short convolution in C++: the meaning's numbers, its windows bit for bit, and nothing beside them."""

import pytest
import torch
from compiled import Compiled
from k3compile.kernels import conv_native
from k3compile.kernels.conv import short_conv, short_conv_verify
from k3compile.kernels.conv_export import short_conv_export
from k3compile.kernels.conv_verify_states import short_conv_verify_states
from k3compile.kernels.native import ISAS, build
from k3compile.kernels.samples import Draw, row_bounds
from k3compile.passes.lower import Lower

RANK = list(ISAS)
RUNNABLE = [isa for isa in RANK[RANK.index(build.best_isa()) :] if isa != "portable"]
OPS = {o.name: o for o in (short_conv, short_conv_export, short_conv_verify, short_conv_verify_states)}
LENGTHS = [1, 0, 9, 2, 3, 1, 4]
OFFSETS = [1, 0, 5, 1, 2, 0, 4]


@pytest.fixture(params=RUNNABLE)
def isa(request):
    if reason := build.unavailable("conv", request.param):
        pytest.skip(reason)
    return request.param


def call(name="short_conv", lengths=LENGTHS, channels=300, seed=0):
    """Arguments of an op; rows live in slots 1, 2, .., the other windows are NaN."""
    draw, rows = Draw(torch.float32, seed), len(lengths)
    window = torch.full((rows * 11 + 2, 3, channels), torch.nan)
    window[1 : rows + 1] = draw.normal(rows, 3, channels)
    x, weight = draw.normal(sum(lengths), channels), draw.normal(channels, 4)
    args = [x, weight, window, torch.arange(1, rows + 1), row_bounds(lengths)]
    if name == "short_conv_export":
        offsets = [min(offset, n) for offset, n in zip(OFFSETS, lengths)]
        places = [rows + 1 + r if offset else 0 for r, offset in enumerate(offsets)]
        args += [torch.tensor(column, dtype=torch.int32) for column in (offsets, places)]
    elif name == "short_conv_verify":
        args.append(torch.full((rows + 2, 9, channels), 7.0))
    elif name == "short_conv_verify_states":
        own, others = torch.arange(1, rows + 1).view(rows, 1), torch.arange(rows + 1, rows * 9 + 1)
        args.append(torch.cat([own, others.view(rows, 8)], 1))
    return args


def native(name, args):
    implementation = OPS[name].implementations["native"]
    if reason := implementation.objection(*args):
        pytest.skip(reason)
    return implementation.fn(*args)


def run(args, isa, moves=True):
    x, weight, window, slots, cu = args
    return conv_native.convolve(x, weight, window, slots, cu, moves=moves, isa=isa)


@pytest.mark.parametrize("lengths", [[], [0], [1], [1] * 5, LENGTHS], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_outputs_are_the_meanings_and_what_is_kept_is_kept_bit_for_bit(name, lengths):
    args, again = call(name, lengths), call(name, lengths)
    got, want = native(name, args), OPS[name].meaning(*again)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    for a, b in zip(args, again, strict=True):
        assert torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))


@pytest.mark.parametrize("channels", [3, 16, 300])
def test_it_is_as_close_to_float64_as_the_meaning(isa, channels):
    squares = torch.zeros(2, dtype=torch.float64)
    for seed in range(20):
        want = short_conv.meaning(
            *(x.double() if i < 3 else x for i, x in enumerate(call("", LENGTHS, channels, seed)))
        )
        for i, fn in enumerate((lambda *a: run(a, isa), short_conv.meaning)):
            squares[i] += (fn(*call("", LENGTHS, channels, seed)).double() - want).square().sum()
    assert squares[0].sqrt() <= 1.1 * squares[1].sqrt(), (squares[0] / squares[1]).sqrt()


def test_large_sums_of_both_signs_are_silu_all_the_same(isa):
    args = call()
    args[0], args[2] = args[0] * 1e3, args[2] * 1e3
    got, want = (
        run(args, isa, False),
        short_conv.meaning(*(x.double() if i < 3 else x for i, x in enumerate(args))),
    )
    assert want.min() > -0.3
    assert want.max() > 1e3
    assert (got - want).abs().max() <= short_conv.tolerance.float32 * want.max()


def test_a_row_does_not_depend_on_company_or_threads(isa):
    lengths = [90, 40]
    want = run(call("", lengths), isa)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(run(call("", lengths), isa), want)
    finally:
        torch.set_num_threads(before)
    x, weight, window, slots, _ = call("", lengths)
    alone = run([x[90:], weight, window, slots[1:], row_bounds([40])], isa)
    assert torch.equal(alone, want[90:])


def test_the_four_ops_give_the_same_bits():
    want = native("short_conv", call())
    for name in OPS:
        assert torch.equal(native(name, call(name)), want)


def test_strided_rows_and_pools_with_gaps_are_read_where_they_are_and_nothing_beside_them(isa):
    want, args = call(), call()
    y = run(want, isa)
    room = torch.full((len(args[0]) + 9, 400), torch.nan)
    room[2 : 2 + len(args[0]), 50:350] = args[0]
    pool = torch.full((len(args[2]), 5, 400), torch.nan)
    pool[:, 1:4, 50:350] = args[2]
    before = pool.clone()
    got = run([room[2:-2, 50:350], args[1], pool[:, 1:4, 50:350], *args[3:]], isa)
    assert torch.equal(got[: len(y)], y)
    assert (got[len(y) :] == 0).all()
    assert torch.equal(pool[:, 1:4, 50:350].nan_to_num(9.0), want[2].nan_to_num(9.0))
    pool[:, 1:4, 50:350] = before[:, 1:4, 50:350]
    assert torch.equal(pool.view(torch.int32), before.view(torch.int32))


def test_nothing_beside_its_rows_is_recorded():
    args = call("short_conv_verify")
    native("short_conv_verify", args)
    rec, begin = args[5], 0
    for slot, n in enumerate(LENGTHS, 1):
        assert torch.equal(rec[slot, :n], args[0][begin : begin + n])
        assert (rec[slot, n:] == 7.0).all()
        begin += n
    assert (rec[[0, -1]] == 7.0).all()


@pytest.mark.parametrize("name", ["short_conv_verify", "short_conv_verify_states"])
def test_a_row_that_is_too_long_is_refused_before_anything_is_written(name):
    args, before = call(name, [10]), call(name, [10])
    with pytest.raises(ValueError, match="a verify row has 10 tokens"):
        native(name, args)
    for a, b in zip(args, before, strict=True):
        assert torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))


def test_an_offset_outside_its_row_is_refused_before_anything_is_written():
    args = call("short_conv_export")
    args[5][0] = 2
    with pytest.raises(ValueError, match="export_offset of row 0 is 2"):
        native("short_conv_export", args)
    assert torch.equal(args[2].nan_to_num(9.0), call()[2].nan_to_num(9.0))


def test_it_objects_to_what_it_cannot_do(monkeypatch):
    args, said = call(), conv_native.objection
    if reason := said(*args):
        pytest.skip(reason)
    assert said(*(a.to("meta") for a in args)) == "meta tensors"
    assert said(args[0].double(), *args[1:]) == "some arguments are torch.float64, not float32"
    assert said(args[0].t().contiguous().t(), *args[1:]) == "channels, or taps, are not side by side"
    monkeypatch.setattr(conv_native, "best_isa", lambda: "portable")
    assert said(*args) == "vectors of four lanes gain nothing"


@pytest.mark.parametrize("name", OPS)
def test_cached_code_runs_where_nothing_can_be_compiled(name, monkeypatch):
    monkeypatch.setattr(build, "_LOADED", {})
    monkeypatch.setattr(build, "compilers", list)
    build.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="the reference computes it"):
        got = OPS[name].implementations["native"].fn(*call(name))
    assert torch.equal(got, OPS[name].meaning(*call(name)))


@pytest.mark.parametrize("name", OPS)
def test_it_is_chosen_and_a_report_says_so(name):
    args, again = call(name), call(name)
    if reason := conv_native.objection(*args):
        pytest.skip(reason)
    compiled = Compiled(lambda *a: OPS[name].overload(*a), (Lower(),))
    got, want = compiled(*args), OPS[name].meaning(*again)
    (remark,) = compiled.remarks(name="lower")
    assert remark.reason == f"computed by native, {conv_native.NOTE}"
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    for a, b in zip(args, again, strict=True):
        assert torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))
