"""What one call is said to do agrees with torch's own counter, and pools are charged by the slot."""

import pytest
import torch
from compiled import Compiled
from k3compile.passes.canonicalize import CANONICALIZE
from k3compile.passes.latent_tail import LATENT_TAIL
from k3compile.passes.lower import Lower
from k3compile.passes.snapshot import snapshot
from lanes import thinned
from latent_tails import k3_norm, make_args, tail, where_after
from pretended_group import pretended_group
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from k3compile.graphdiff.cost import cost
from k3compile.graphdiff.cost_rules import Call, by_rows, work_of


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


def test_attention_to_a_shard_reads_the_rows_of_this_rank_and_meets_all_heads_with_them():
    pages, table = tensor(50, 4, 20), tensor(3, 6, dtype="int64")  # a page of 4 rows here
    arguments = tensor(16, 7, 20), pages, table, tensor(3), tensor(4), tensor(3), 16, 0.5
    work = work_of(Call("k3.mla_attend_shard.default", arguments, {}, (tensor(16, 7, 16), tensor(16, 7))))
    assert work.read == 3 * 6 * 4 * 20 * 4 + 16 * 7 * 20 * 4
    assert work.flops == 2 * 16 * 7 * (6 * 4) * (20 + 16)


def test_a_context_that_comes_is_sent_read_and_expanded():
    pages, table = tensor(50, 4, 20), tensor(3, 6, dtype="int64")
    inputs = tensor(7, 2, 16), tensor(2 * (12 + 8), 16), tensor(2, 0, 8), pages, table, tensor(3), tensor(4)
    call = Call(
        "k3.mla_attend_gathered.default", (*inputs, tensor(7, 20), "group", 1), {}, (tensor(7, 2, 8),)
    )
    work = work_of(call)
    came = 3 * 6 * 4 * 20 * 4
    assert (work.collectives, work.collective_bytes) == (1, came)
    assert work.read == came + 4 * (7 * 2 * 16 + 2 * 20 * 16 + 7 * 20)
    assert work.flops == 2 * 7 * 2 * (6 * 4) * (16 + 8) + 2 * (2 * 20 * 16) * (3 * 6 * 4 + 7)


def test_the_two_ends_of_latent_attention_are_half_an_expansion_each():
    kv_b = tensor(4 * (12 + 8), 16)
    absorb = Call("k3.mla_absorb.default", (tensor(7, 4, 16), kv_b, 12), {}, (tensor(4, 7, 20),))
    expand = Call("k3.mla_expand.default", (tensor(4, 7, 16), kv_b, 8), {}, (tensor(4, 7, 8),))
    assert work_of(absorb).flops == 2 * 7 * 4 * 12 * 16
    assert work_of(expand).flops == 2 * 7 * 4 * 8 * 16


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


L, D, RANKS = 24, 16, 4


def tail_snapshots(tier):
    """The graph of a tail over 4 ranks in float32: as it is written, as one op, and lowered to ``tier``."""

    def forward(rows, w, idx, norm_w, up_w, shared):
        torch._check(w.shape[0] == idx.shape[0])
        torch._check(shared.shape[0] == idx.shape[0])
        return tail(where_after, k3_norm, group=name)(rows, w, idx, norm_w, up_w, shared)

    stages = (CANONICALIZE, LATENT_TAIL, Lower(providers={"latent_tail": tier}))
    found = []
    with pretended_group(RANKS) as name:
        for count in (1, 2, 3):
            names = "L['rows']:0,L['w']:0,L['idx']:0,L['shared']:0"
            made = Compiled(forward, stages[:count], unbacked=names)
            made(*make_args(tokens=5, top_k=2, latent=L, width=D))
            found.append(cost(snapshot(made.graphs[-1])))
    return found


def at(found, tokens):
    """Collectives, their bytes, and bytes read, of ``tokens`` rows."""
    sizes = dict.fromkeys(found.unknown, tokens)
    now = found.at(sizes)
    return now["collectives"], now["collective_bytes"], now["bytes_read"]


@pytest.mark.parametrize(
    ("tier", "collectives", "gathered", "parts"),
    thinned([("overlap", 2, 0, 1), ("fused", 3, 4 * D // RANKS, RANKS), ("column", 2, 0, RANKS)], 1, True),
)
def test_each_tier_is_priced_for_what_it_sends_and_reads(tier, collectives, gathered, parts):
    before, after, final = tail_snapshots(tier)
    for tokens in (1, 64, 1000):
        sums = 4 * tokens * (L + D)
        assert at(before, tokens)[:2] == at(after, tokens)[:2] == (2, sums)
        assert at(final, tokens)[:2] == (collectives, sums + tokens * gathered)
        saved = at(after, tokens)[2] - at(final, tokens)[2]
        assert saved == 4 * D * L * (parts - 1) // parts


@pytest.mark.slow
def test_tiers_by_row_count_are_priced_by_row_count():
    *_, final = tail_snapshots("tiers")
    alone = {tier: tail_snapshots(tier)[-1] for tier in ("fused", "overlap", "column")}
    for tokens, tier in ((1, "fused"), (128, "fused"), (129, "overlap"), (256, "overlap"), (257, "column")):
        assert at(final, tokens) == at(alone[tier], tokens), tier
    assert "Piecewise" in final.to_json()["collectives"]


def test_a_known_number_of_rows_has_the_first_tier_that_reaches_it():
    tiers = [{"up_to": 128, "bytes": 30}, {"up_to": 256, "bytes": "20"}, {"up_to": None, "bytes": 10}]
    found = [by_rows(rows, "bytes", tiers) for rows in (0, 128, 129, 256, 257)]
    assert found == [30, 30, 20, 20, 10]
    assert by_rows(1, "bytes", tiers, unit=2) == 15


def test_an_implementation_costs_what_its_op_costs():
    args = (tensor(8, 4), tensor(2, 4), tensor(2, 4, dtype="int32"), tensor(4), tensor(16, 4), tensor(2, 16))
    call = Call("k3.latent_tail.default", (*args, 1e-5, ""), {}, (tensor(2, 16),))
    assert work_of(call._replace(target="k3.latent_tail.cpu")) == work_of(call)
