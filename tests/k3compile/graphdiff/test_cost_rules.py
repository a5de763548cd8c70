"""What one call is said to do agrees with torch's own counter, and pools are charged by the slot."""

import pytest
import torch
from k3compile.passes.snapshot import snapshot
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from k3compile.graphdiff.cost import cost
from k3compile.graphdiff.cost_rules import Call, work_of


def tensor(*dims, dtype="float32"):
    stride = [1] * len(dims)
    return {"shape": list(dims), "dtype": dtype, "stride": stride, "storage": None}


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        (lambda x, w: x @ w, [(7, 5), (5, 3)]),
        (lambda x, w: torch.bmm(x, w), [(2, 7, 5), (2, 5, 3)]),
        (lambda x, w, b: torch.addmm(b, x, w), [(7, 5), (5, 3), (3,)]),
        (lambda x, w: F.linear(x, w), [(7, 5), (3, 5)]),
    ],
)
def test_products_cost_what_torch_counts(function, sizes):
    inputs = [torch.randn(*s) for s in sizes]
    with FlopCounterMode(display=False) as counter:
        function(*inputs)
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    assert cost(snapshot(gm)).flops == counter.get_total_flops()


def test_a_gather_reads_its_rows_and_not_the_table():
    call = Call(
        "aten.index_select.default", (tensor(1000, 8), 0, tensor(3, dtype="int64")), {}, (tensor(3, 8),)
    )
    assert work_of(call).read == 3 * 8 * 4 + 3 * 8


def test_a_prefill_is_charged_for_its_slots_and_not_for_the_pool():
    inputs = [tensor(10, 2, 4), tensor(10, 2, 4), tensor(10, 2, 6), tensor(10, 2, 4), tensor(10, 2)]
    names = dict(zip(("q", "k", "v", "g", "beta"), inputs))
    state, slots = tensor(500, 2, 6, 4), tensor(3, dtype="int64")
    call = Call("k3.kda_prefill.default", (), {**names, "state": state, "slots": slots}, (tensor(10, 2, 6),))
    work = work_of(call)
    states = 3 * 2 * 6 * 4 * 4
    assert work.read == 4 * (3 * 80 + 120 + 20) + states
    assert work.written == 4 * 120 + states
    assert work.flops == 7 * 10 * 2 * 4 * 6


def test_a_verify_writes_records_and_leaves_the_states():
    inputs = [tensor(10, 2, 4), tensor(10, 2, 4), tensor(10, 2, 6), tensor(10, 2, 4), tensor(10, 2)]
    names = dict(zip(("q", "k", "v", "g", "beta"), inputs))
    call = Call(
        "k3.kda_verify.default",
        (),
        {**names, "state": tensor(9, 2, 6, 4), "slots": tensor(3, dtype="int64")},
        (tensor(10, 2, 6),),
    )
    assert work_of(call).written == 4 * (120 + 120 + 80 + 80)
    without_records = work_of(call._replace(target="k3.kda_verify_states.default"))
    assert without_records.written == 4 * 120 + 10 * 4 * 2 * 6 * 4
    assert without_records.read == work_of(call).read


def test_a_convolution_writes_windows_or_records_or_a_window_a_row():
    x, weight, window, slots = tensor(10, 6), tensor(6, 4), tensor(9, 3, 6), tensor(2, dtype="int64")
    written = [
        work_of(Call(f"k3.short_conv{form}.default", (x, weight, window, slots), {}, (x,))).written
        for form in ("", "_verify", "_verify_states")
    ]
    assert written == [4 * (60 + 2 * 18), 4 * (60 + 60), 4 * (60 + 10 * 18)]


def test_no_more_experts_are_read_than_there_are():
    ids, weights = tensor("u0", 4, dtype="int64"), tensor(8, 16, 4, dtype="uint8")
    call = Call("k3.experts_unfinalized.default", (tensor("u0", 8), ids, weights), {}, (tensor("4*u0", 8),))
    read = work_of(call).read
    (symbol,) = read.free_symbols
    each = 16 * 4
    assert read.subs(symbol, 1) == 8 * 4 + 4 * 8 + 4 * each
    assert read.subs(symbol, 100) == 100 * (8 * 4 + 4 * 8) + 8 * each


@pytest.mark.parametrize(("group", "collectives"), [("0", 2), ("", 0)])
def test_the_latent_tail_carries_the_sums_over_ranks_it_absorbed(group, collectives):
    args = (
        tensor(8, 4),
        tensor(2, 4),
        tensor(2, 4, dtype="int32"),
        tensor(4),
        tensor(16, 4),
        tensor(2, 16),
        1e-5,
        group,
    )
    work = work_of(Call("k3.latent_tail.default", args, {}, (tensor(2, 16),)))
    assert work.collectives == collectives
    assert work.collective_bytes == (2 * 16 * 4 + 2 * 4 * 4 if group else 0)


def test_an_empty_tensor_is_memory_without_work():
    assert work_of(Call("aten.new_empty.default", (tensor(3),), {}, (tensor(9),)))[:4] == (0, 0, 0, 0)


def test_a_collective_is_counted_with_its_bytes():
    work = work_of(
        Call("_c10d_functional.all_reduce.default", (tensor(5, 2), "sum", "0"), {}, (tensor(5, 2),))
    )
    assert (work.collectives, work.collective_bytes) == (1, 40)
