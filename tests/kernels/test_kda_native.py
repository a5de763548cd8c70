"""KDA's single step in C++: the meaning's numbers on every instruction set, in place, and nothing beside."""

from functools import partial

import pytest
import torch
from compiled import Compiled
from k3compile.kernels import kda_native
from k3compile.kernels.kda import kda_prefill, kda_prefill_into, one_step
from k3compile.kernels.kda_chunk import Inputs
from k3compile.kernels.kda_export import kda_prefill_export, kda_prefill_export_into
from k3compile.kernels.native import ISAS, build
from k3compile.kernels.samples import Draw, gapped, packed_heads, row_bounds
from k3compile.passes.lower import Lower
from lanes import thinned

RANK = list(ISAS)
RUNNABLE = RANK[RANK.index(build.best_isa()) :]  # what this CPU can run: its best, and all below
SHAPES = [(3, 20, 12), (1, 128, 128), (2, 64, 128), (2, 128, 64), (2, 16, 16)]
SHAPES += [(4, 8, 3), (4, 17, 3), (4, 31, 3)]  # H, K, V; what no vector divides, too


@pytest.fixture(params=thinned(RUNNABLE, 1))
def isa(request):
    if reason := build.unavailable("kda", request.param):
        pytest.skip(reason)
    return request.param


def drawn(tokens, heads, keys, values, decay=5.0):
    draw = Draw(torch.float32)
    q, k = draw.unit(tokens, heads, keys) * keys**-0.5, draw.unit(tokens, heads, keys)
    v, beta = draw.normal(tokens, heads, values), draw.fraction(tokens, heads)
    g = -decay * draw.fraction(tokens, heads, keys)
    return Inputs(q, k, v, g, beta), draw.normal(2 * tokens + 2, heads, values, keys)


def wide(inputs):
    return Inputs(*(x.double() for x in inputs))


def error(got, want):
    return ((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt()).item()


def stepped(fn, inputs, state, slots, tokens, **how):
    """(o, state) of one step by ``fn``, from a copy of the state."""
    state, out = state.clone(), torch.zeros_like(inputs.v)
    fn(inputs, state, slots, tokens, out, 0, **how)
    return out, state


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("together", [1, 8])
def test_it_is_as_close_to_float64_as_the_meaning(isa, shape, together):
    inputs, state = drawn(40, *shape)
    errors = []
    for fn, given, begin in (
        (partial(kda_native.step, isa=isa), inputs, state.clone()),
        (one_step, inputs, state.clone()),
        (one_step, wide(inputs), state.double()),
    ):
        out = torch.zeros_like(given.v)
        for first in range(0, 40, together):
            rows = list(range(first, first + together))
            fn(given, begin, [40 - r for r in rows], rows, out, 0)
        errors.append((out, begin))
    for got, meaning, want in zip(*errors):
        assert error(got, want) <= 1.1 * error(meaning, want)


@pytest.mark.parametrize("keys", [1, 5, 17, 31])
def test_widths_that_no_vector_divides_stay_within_the_tolerance(isa, keys):
    inputs, state = drawn(6, 4, keys, 3)
    got = stepped(kda_native.step, inputs, state, [1, 2, 3], [0, 1, 2], isa=isa)
    want = stepped(one_step, wide(inputs), state.double(), [1, 2, 3], [0, 1, 2])
    for g, w in zip(got, want):
        assert (g.double() - w).abs().max() <= kda_prefill.tolerance.float32 * w.abs().max()


@pytest.mark.parametrize("keys", [1, 5, 7])
def test_keys_too_narrow_to_be_as_exact_are_left_to_the_meaning(keys):
    inputs, state = drawn(2, 4, keys, 3)
    said = kda_native.objection(*inputs, state, torch.tensor([1]), torch.tensor([0, 1]))
    assert said == f"keys of {keys} channels, where only 8 or more are as exact as the meaning's"


@pytest.mark.parametrize("decay", [0.0, 30.0, 1e4])
def test_extreme_gates_stay_finite(isa, decay):
    inputs, state = drawn(3, 2, 20, 12, decay)
    got = stepped(kda_native.step, inputs, state, [1, 2, 3], [0, 1, 2], isa=isa)
    want = stepped(one_step, wide(inputs), state.double(), [1, 2, 3], [0, 1, 2])
    for g, w in zip(got, want):
        torch.testing.assert_close(g.double(), w, rtol=1e-5, atol=1e-6)


def test_no_decay_and_no_write_leave_the_state_as_it_was(isa):
    inputs, state = drawn(2, 3, 20, 12)
    still = inputs._replace(g=torch.zeros_like(inputs.g), beta=torch.zeros_like(inputs.beta))
    assert torch.equal(stepped(kda_native.step, still, state, [1, 2], [0, 1], isa=isa)[1], state)


def test_strided_rows_and_a_pool_with_gaps_are_read_where_they_are(isa):
    inputs, state = drawn(6, 3, 20, 12)
    slots, tokens = [4, 1], [2, 5]
    want = stepped(kda_native.step, inputs, state, slots, tokens, isa=isa)
    q, k, v = packed_heads([inputs.q, inputs.k, inputs.v])
    columns = inputs.g.permute(2, 0, 1).contiguous().permute(1, 2, 0)  # channels are no neighbours
    beta = inputs.beta.t().contiguous().t()
    pool, out = gapped(state), torch.zeros(12, 6, 3).permute(1, 2, 0)
    kda_native.step(Inputs(q, k, v, columns, beta), pool, slots, tokens, out, 0, isa=isa)
    assert torch.equal(out, want[0])
    assert torch.equal(pool, want[1])
    turned = state.transpose(2, 3).contiguous().transpose(2, 3)
    out = torch.zeros_like(inputs.v)
    kda_native.step(inputs, turned, slots, tokens, out, 0, isa=isa)
    torch.testing.assert_close(out, want[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("keys", [5, 16, 20])
def test_nothing_beside_its_rows_is_read_or_written(isa, keys):
    inputs, state = drawn(6, 3, keys, 12)
    slots, tokens = [4, 1], [2, 5]
    want = stepped(kda_native.step, inputs, state, slots, tokens, isa=isa)
    poisoned = []
    for x in inputs:
        room = torch.full((x.shape[0] + 4, *(n + 16 for n in x.shape[1:])), torch.nan)
        inner = room[(slice(2, -2), *(slice(8, -8) for _ in x.shape[1:]))]
        inner[tokens] = x[tokens]
        poisoned.append(inner)
    room = torch.full((len(state), 5, 28, keys + 16), torch.nan)
    pool = room[:, 1:4, 8:-8, 8:-8]
    pool[slots] = state[slots]
    out = torch.full((8, 3, 12), 7.0)
    before = room.clone()
    kda_native.step(Inputs(*poisoned), pool, slots, tokens, out, 1, isa=isa)
    assert torch.equal(out[[3, 6]], want[0][tokens])
    assert (out[[0, 1, 2, 4, 5, 7]] == 7.0).all()
    assert torch.equal(pool[slots], want[1][slots])
    pool[slots] = before[:, 1:4, 8:-8, 8:-8][slots]
    assert torch.equal(room.view(torch.int32), before.view(torch.int32))


def test_a_step_whose_output_nobody_wants_moves_the_state(isa):
    inputs, state = drawn(3, 2, 20, 12)
    want = stepped(kda_native.step, inputs, state, [3], [1], isa=isa)[1]
    kda_native.step(inputs, state, [3], [1], None, 0, isa=isa)
    assert torch.equal(state, want)


def test_a_row_does_not_depend_on_threads_or_company(isa):
    inputs, state = drawn(6, 4, 128, 64)
    slots, tokens = [1, 2, 3, 4], [0, 2, 3, 5]
    alone = stepped(kda_native.step, inputs, state, [3], [3], isa=isa)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        together = stepped(kda_native.step, inputs, state, slots, tokens, isa=isa)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together[0][3], alone[0][3])
    assert torch.equal(together[1][3], alone[1][3])


def call(op, lengths, offsets=None):
    """Arguments of one of the four ops for rows of these lengths."""
    tokens, rows = sum(lengths), len(lengths)
    inputs, state = drawn(max(tokens, rows), 3, 20, 12)
    args = [*(x[:tokens] for x in inputs), state, torch.arange(1, rows + 1), row_bounds(lengths)]
    if offsets is not None:
        places = [len(state) - 1 - i if n else 0 for i, n in enumerate(offsets)]
        args += [torch.tensor(offsets, dtype=torch.int32), torch.tensor(places, dtype=torch.int32)]
    if "into" in op.name:
        args += [torch.full((tokens + 3, 3, 12), 7.0), 2]
    return args


CALLS = [
    ([], []),
    ([0], [0]),
    ([1], [1]),
    ([1, 1, 0, 1], [0, 1, 0, 0]),
    ([1, 5, 0, 70, 1, 70], [1, 1, 0, 64, 0, 67]),
]


def both(name, lengths, offsets):
    """Arguments, results and the meaning's of ``kda_prefill<name>``."""
    op = {o.name: o for o in (kda_prefill, kda_prefill_into, kda_prefill_export, kda_prefill_export_into)}[
        f"kda_prefill{name}"
    ]
    args, again = (call(op, lengths, offsets if "export" in name else None) for _ in range(2))
    if reason := op.implementations["native"].objection(*args):
        pytest.skip(reason)
    return [op.implementations["native"].fn(*args), *args], [op.meaning(*again), *again]


@pytest.mark.parametrize(("lengths", "offsets"), CALLS, ids=str)
@pytest.mark.parametrize("name", ["", "_into", "_export", "_export_into"])
def test_the_ops_agree_with_their_meanings_for_rows_of_any_length(name, lengths, offsets):
    for got, want in zip(*both(name, lengths, offsets)):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["_into", "_export", "_export_into"])
def test_the_four_ops_give_the_same_bits(name):
    lengths, offsets = CALLS[-1]
    (plain, *args), _ = both("", lengths, offsets)
    (result, *others), _ = both(name, lengths, offsets)
    out = others[-2][2 : 2 + len(plain)] if result is None else result
    assert torch.equal(out, plain)
    assert torch.equal(args[5][: len(lengths) + 1], others[5][: len(lengths) + 1])


def test_token_rows_past_the_last_row_are_not_read_and_come_back_zero():
    args, want = call(kda_prefill, [5, 1]), call(kda_prefill, [5, 1])
    if reason := kda_native.objection(*args):
        pytest.skip(reason)
    args[:5] = [torch.cat([x, torch.full((7, *x.shape[1:]), torch.nan)]) for x in args[:5]]
    got = kda_native.prefill_native(*args)
    assert torch.equal(got[:6], kda_native.prefill_native(*want))
    assert (got[6:] == 0).all()


@pytest.mark.parametrize("why", ["turned", "portable"])
def test_longer_rows_that_would_gain_nothing_go_on_as_in_the_meaning(why, monkeypatch):
    lengths, offsets = CALLS[-1]
    args, again = call(kda_prefill_export, lengths, offsets), call(kda_prefill_export, lengths, offsets)
    if reason := kda_native.objection(*args):
        pytest.skip(reason)
    if why == "turned":
        args[5] = args[5].mT.contiguous().mT
    else:
        monkeypatch.setattr(kda_native, "cannot", lambda: "four lanes")
    monkeypatch.setattr(kda_native, "whole_rows", None)
    got, want = kda_native.prefill_export_native(*args), kda_prefill_export.meaning(*again)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(args[5], again[5], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("offset", [1, 2, 64, 65, 70])
def test_a_checkpoint_has_the_bits_of_a_run_that_stops_there(offset):
    args = call(kda_prefill_export, [70], [offset])
    if reason := kda_native.objection(*args):
        pytest.skip(reason)
    short = [x[:offset].clone() for x in args[:5]]
    stopped = args[5].clone()
    kda_native.prefill_native(*short, stopped, args[6], row_bounds([offset]))
    kda_native.prefill_export_native(*args)
    assert torch.equal(args[5][args[9][0]], stopped[1])


def test_it_objects_to_what_it_cannot_do(monkeypatch):
    args = call(kda_prefill, [1])
    assert "float64, not float32" in kda_native.objection(args[0].double(), *args[1:])
    assert kda_native.objection(*(a.to("meta") for a in args)) == "meta tensors"
    monkeypatch.setattr(build, "_LOADED", {})
    monkeypatch.setattr(build, "compilers", list)
    assert "no C++ compiler" in kda_native.objection(*args)
    with pytest.warns(RuntimeWarning, match="no native kda kernel"):
        got = torch.ops.k3.kda_prefill.native(*args)
    assert torch.equal(got, kda_prefill.meaning(*call(kda_prefill, [1])))


def test_it_is_chosen_and_the_state_of_the_caller_moves():
    args, again = call(kda_prefill, [1, 1]), call(kda_prefill, [1, 1])
    if reason := kda_native.objection(*args):
        pytest.skip(reason)
    compiled = Compiled(lambda *a: kda_prefill.overload(*a), (Lower(),))
    got = compiled(*args)
    (remark,) = compiled.remarks(name="lower")
    assert remark.reason == f"computed by native, {kda_native.NOTE}"
    want = kda_prefill.meaning(*again)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(args[5], again[5], rtol=1e-5, atol=1e-6)
    assert not torch.equal(args[5], call(kda_prefill, [1, 1])[5])
