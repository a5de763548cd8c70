"""Gathers and scatters of proven ranges become views and writes; every other one stays and says why."""

import pytest
import torch
from compiled import Compiled, check
from k3compile.passes.contiguous_views import CONTIGUOUS_VIEWS
from k3compile.passes.runner import Fuel
from mixed_batch import MIXES, UNBACKED, inputs, layer

SPELLINGS = pytest.mark.parametrize("decompose", [False, True], ids=["plain ATen", "decomposed"])


def table(rows: int = 8, width: int = 3) -> torch.Tensor:
    return torch.arange(float(rows * width)).view(rows, width)


@pytest.fixture(scope="module", params=[False, True], ids=["plain ATen", "decomposed"])
def mixed(request):
    """The mixed batch, compiled, and held against eager on every mix."""
    return check(layer, *[inputs(*mix) for mix in MIXES], decompose=request.param, unbacked=UNBACKED)


def test_the_mixed_batch_has_no_index_operation_left(mixed):
    assert len(mixed.graphs) == 1
    assert len(mixed.applied()) == 8
    assert not mixed.missed()
    left = mixed.targets()
    assert not [t for t in left if "index" in t or "iota" in t or "arange" in t or "scatter" in t]
    assert sum("slice" in t for t in left) == 8, "six for the spans, two for the slots"


def test_both_scatters_of_the_mixed_batch_are_written_by_the_ops(mixed):
    details = [r.detail.split() for r in mixed.remarks("applied")[6:]]
    assert [d[0] for d in details] == ["k3.kda_verify_into", "k3.kda_prefill_into"]
    first, second = (n for n in mixed.graphs[0].graph.nodes if "auto_functionalized" in str(n.target))
    assert "_out_base_index" in first.kwargs
    assert second.kwargs["_all_bases"][-1].args[0] is first, "the second writes what the first left"


def test_every_bound_of_the_mixed_batch_is_proven_from_the_checks(mixed):
    for remark in mixed.remarks():
        obligations = {p.obligation: p for p in remark.proofs}
        assert {"index is a range", "0 <= start", "0 <= length", "end <= size"} <= obligations.keys()
        assert obligations["end <= size"].how == "torch._check"
        assert remark.source is not None
        assert "mixed_batch.py:" in remark.source


def test_a_missing_check_is_named_in_the_users_own_words():
    def f(x, spans):
        nd = spans[0].item()
        torch._check(nd >= 0)
        rows = torch.arange(0, nd)
        return torch.index_select(x, 0, rows) + 1

    compiled = check(f, [table(), torch.tensor([3])], unbacked="L['x']:0")
    (remark,) = compiled.remarks()
    assert (remark.kind, remark.reason) == ("missed", "unproven: end <= size (R2)")
    assert remark.fix_it == "add torch._check(nd <= x.shape[0])"
    assert remark.source.startswith(__file__)


def test_out_of_range_still_raises_where_nothing_was_proven():
    compiled = Compiled(
        lambda x, spans: x.index_select(0, torch.arange(spans[0].item())), unbacked="L['x']:0"
    )
    assert torch.equal(compiled(table(), torch.tensor([2])), table()[:2])
    with pytest.raises((IndexError, RuntimeError)):
        compiled(table(), torch.tensor([9]))


def spans_of(x, spans):
    start, end = spans[0].item(), spans[1].item()
    torch._check(start >= 0)
    torch._check(start <= end)
    torch._check(end <= x.shape[0])
    return start, end


RUNS = {
    "arange": lambda s, e: torch.arange(s, e),
    "clone": lambda s, e: torch.arange(s, e).clone(),
    "shifted": lambda s, e: torch.arange(e - s) + s,
    "shifted back": lambda s, e: torch.arange(s + 2, e + 2) - 2,
    "a piece of a split": lambda s, e: torch.arange(e).split([s, e - s])[1],
    "two runs that meet": lambda s, e: torch.cat([torch.arange(s), torch.arange(s, e)])[s:],
    "a tail": lambda s, e: torch.arange(e)[s:],
    "reshaped": lambda s, e: torch.arange(s, e).view(-1),
}


@pytest.mark.parametrize("build", RUNS.values(), ids=RUNS.keys())
def test_a_run_is_recognised_however_it_is_built(build):
    def f(x, y, spans):
        start, end = spans_of(x, spans)
        rows = build(start, end)
        torch._check(rows.shape[0] == end - start)
        torch._check(end <= y.shape[0])
        return x.index_select(0, rows) * 2, torch.index_copy(y, 0, rows, x.index_select(0, rows))

    calls = [[table(), table() + 100, torch.tensor(s)] for s in ([2, 5], [0, 0], [8, 8], [0, 8], [3, 4])]
    compiled = check(f, *calls, unbacked="L['x']:0,L['y']:0")
    assert len(compiled.graphs) == 1
    assert not compiled.missed()


REFUSED = {
    "a graph input": (lambda i: i, "index comes from a graph input (R1)"),
    "reversed": (lambda i: torch.arange(2, -1, -1), "step is -1 (R1)"),
    "strided": (lambda i: torch.arange(0, 6, 2), "step is 2 (R1)"),
    "duplicates": (lambda i: torch.arange(3).clamp(max=1), "index comes from aten.arange (R1)"),
    "a constant": (lambda i: torch.tensor([3, 4, 5]), "index comes from a constant (R1)"),
    "repeated": (lambda i: torch.arange(1).expand(3), "index comes from aten.expand (R1)"),
    "permuted": (lambda i: torch.arange(3).flip(0), "index comes from aten.flip (R1)"),
    "scaled": (lambda i: torch.arange(3) * 2, "index comes from aten.mul (R1)"),
    "subtracted from": (lambda i: 3 - torch.arange(3), "index comes from aten.rsub (R1)"),
    "through float": (lambda i: torch.arange(3.0).long(), "passes through torch.float32 (R1)"),
    "through bytes": (lambda i: torch.arange(3).to(torch.int8).long(), "passes through torch.int8 (R1)"),
    "two runs": (
        lambda i: torch.cat([torch.arange(0, 2), torch.arange(4, 6)]),
        "the class changes more than once: its rows are [0, 2) and [4, 6) (R1)",
    ),
    "sorted": (lambda i: i.sort().values, "index comes from aten.sort (R1)"),
}


@pytest.mark.parametrize(("build", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_proven_run_stays(build, reason):
    def f(x, i):
        rows = build(i)
        y = x.index_select(0, rows)
        return y + 1, torch.index_copy(x, 0, rows, y * 2)

    compiled = check(f, [table(), torch.tensor([2, 0, 1])])
    assert compiled.missed() == [reason, reason]
    assert not compiled.applied()


def test_a_mask_and_a_table_of_indices_stay():
    def f(x, keep, ids):
        return x[keep.nonzero().squeeze(1)] * 2, x[ids], x[:, torch.arange(2)][torch.arange(1)]

    compiled = check(f, [table(), torch.tensor([True, False] * 4), torch.tensor([[1, 2], [3, 4]])])
    assert "index comes from aten.nonzero (R1)" in compiled.missed()
    assert "the index has 2 dimensions (R1)" in compiled.missed()


@SPELLINGS
def test_columns_are_sliced_only_if_the_strides_stay(decompose):
    compiled = check(lambda x: x.index_select(1, torch.arange(1, 3)) + 1, [table()], decompose=decompose)
    assert compiled.missed() == ["the result would have other strides (R3)"]
    compiled = check(lambda x: x.index_select(1, torch.arange(1, 3)) + 1, [table(1)])
    assert compiled.missed() == ["the result would have other strides (R3)"]


def bounded(x, n):
    torch._check(n >= 0)
    torch._check(n <= x.shape[0])
    return torch.arange(n)


def test_a_view_does_not_reach_an_output():
    def f(x, n: int):
        y = x.index_select(0, bounded(x, n))
        return y, y.view(-1), y.clone()

    assert check(f, [table(), 6], dynamic=True).missed() == [
        "the view would reach an output of the graph (R4)"
    ]


def test_a_view_is_not_taken_of_what_is_written_before_its_last_read():
    def f(x, n: int):
        y = x.index_select(0, bounded(x, n))
        x.mul_(2)
        return y + 1, y + x[:1]

    check(f, [table(), 6], dynamic=True)

    def written_by_an_op(x, n: int, window, w, slots, cu):
        y = window.index_select(0, bounded(window, n))
        torch.ops.k3.short_conv(x, w, window, slots, cu)
        return y + 1

    args = [table(4, 4), 2, torch.rand(8, 3, 4), torch.rand(4, 4), torch.tensor([1]), torch.tensor([0, 4])]
    assert check(written_by_an_op, args, dynamic=True).missed() == [
        "the base is written before the view is last read (R5)"
    ]


def test_a_view_is_not_handed_to_what_writes_its_base(rev_into):
    def f(x, n: int):
        rev_into(x.index_select(0, bounded(x, n)), x)
        return x * 2

    assert check(f, [table(), 6], dynamic=True).missed() == [
        "a consumer that takes the view writes the same storage (R6)"
    ]

    def through_a_view_and_a_copy(x, n: int):
        rev_into(x.index_select(0, bounded(x, n)).view(-1, 3).clone(), x)
        return x * 2

    reasons = check(through_a_view_and_a_copy, [table(), 6], dynamic=True).missed()
    assert reasons == ["a consumer that takes the view writes the same storage (R6)"]


def test_a_view_is_not_written_through(rev_into):
    def f(x, z, n: int):
        y = x.index_select(0, bounded(x, n))
        rev_into(z, y)
        return y + 1

    reasons = check(f, [table(), -table(2), 6], dynamic=True).missed()
    assert reasons == ["a consumer would write through the view (R6)"]


def test_rows_copied_within_one_tensor_are_not_read_through_a_view():
    def f(x, n: int):
        rows = bounded(x, n)
        x.index_copy_(0, rows + 1, x.index_select(0, rows))
        return x.sum()

    compiled = check(f, [table(), 5], dynamic=True)
    assert "a consumer that takes the view writes the same storage (R6)" in compiled.missed()


def test_a_small_view_does_not_keep_a_large_tensor():
    def f(x):
        return (x * 2).index_select(0, torch.arange(2)) + 1

    reason = "the view would keep a tensor at least 16 times larger alive (R8)"
    assert check(f, [table(64)]).missed() == [reason]
    assert check(f, [table(8)]).applied() == ["aten.index_select"]


TARGETS = {
    "dense": (lambda t: t, None),
    "slice": (lambda t: t[1:7], None),
    "columns": (lambda t: t[:, 1:3], None),
    "transposed": (lambda t: t.t().contiguous().t(), None),
}


@pytest.mark.parametrize("view", [v for v, _ in TARGETS.values()], ids=TARGETS.keys())
@pytest.mark.parametrize("outside", [False, True], ids=["a view made inside", "a view as input"])
def test_a_scatter_writes_every_kind_of_target(view, outside):
    def f(t, y):
        target = t if outside else view(t)
        target.index_copy_(0, torch.arange(2, 5), y)
        return target + 1, t * 2

    t = table()
    target = view(t) if outside else t
    check(f, [target, torch.rand(3, view(t).shape[1])])


def test_a_target_that_overlaps_itself_stays():
    def f(t, y):
        return torch.index_copy(t.expand(6, 3), 0, torch.arange(2, 5), y)

    compiled = Compiled(f)
    compiled(table(1), torch.rand(3, 3))
    assert compiled.missed() == ["the target may overlap itself (R3)"]


@SPELLINGS
def test_a_scattered_input_that_is_overwritten_later_stays(decompose):
    def f(x, y):
        z = torch.index_copy(x, 0, torch.arange(1, 3), y)
        x.zero_()
        return z

    compiled = check(f, [table(4, 6), -torch.ones(2, 6)], decompose=decompose)
    assert compiled.missed() == ["the target is written elsewhere too (R5)"]


def test_a_target_written_twice_and_a_source_inside_the_target_stay():
    def f(x, y):
        z = torch.index_copy(x, 0, torch.arange(8).flip(0), x)
        x.index_copy_(0, torch.arange(8), z * 1)
        return z, torch.index_copy(y, 0, torch.arange(3), y[1:4])

    reasons = check(f, [table(), table()]).missed()
    assert reasons[1:] == [
        "the target is written elsewhere too (R5)",
        "the source is memory of the target (R6)",
    ]


def test_a_broadcast_source_and_an_accumulating_scatter_stay():
    def f(x, y):
        return x.index_put((torch.arange(3),), y), x.index_put((torch.arange(3),), x[:3], accumulate=True)

    compiled = check(f, [table(), torch.tensor(7.0)])
    assert compiled.missed() == ["the source is broadcast over the rows (R3)", "it accumulates (R1)"]


@pytest.mark.parametrize("rows", [[3, 4, 5], [5, 4, 3], [0, 2, 4], [0, 0, 2], [2, 0, 1], [6], list(range(8))])
@pytest.mark.parametrize("place", ["constant", "input", "computed"])
def test_index_patterns_as_constant_input_and_computed(rows, place):
    def f(x, y, i):
        index = {"constant": torch.tensor(rows), "input": i, "computed": i + 0}[place]
        got = x.index_select(0, index)
        x.index_copy_(0, index, y)
        return got + 1, x * 2

    y = torch.rand(len(rows), 3)
    if len(set(rows)) < len(rows):
        y = y[:1].expand(len(rows), 3).contiguous()  # which of several writes wins is not defined
    assert not check(f, [table(), y, torch.tensor(rows)]).applied()


def test_fuel_stops_between_two_rewrites():
    def f(x):
        rows = torch.arange(3)
        return x.index_select(0, rows) + 1, x.index_select(0, rows) * 2, x[rows] - 1

    compiled = check(f, [table()], fuel=Fuel(1), passes=(CONTIGUOUS_VIEWS,))
    assert [r.kind for r in compiled.remarks()] == ["applied", "missed", "missed"]
    assert compiled.missed() == ["stopped by fuel or by the bisector"] * 2


def test_a_disabled_pass_leaves_the_graph_alone():
    def f(x):
        return x.index_select(0, torch.arange(3)) + 1

    compiled = check(f, [table()], disabled=frozenset({"contiguous_views"}))
    assert [r.reason for r in compiled.remarks()] == ["disabled by name"]
    assert any("index_select" in t for t in compiled.targets())


def test_inputs_that_overlap_later_are_read_as_eager_reads_them():
    def f(x, y, n: int):
        got = x.index_select(0, bounded(x, n))
        y.add_(1)
        return got * 2

    base = torch.arange(40.0).view(10, 4)
    calls = [
        [base[:4].clone(), base[4:8].clone(), 3],
        [base[:4], base[2:6], 3],
        [base[:4], base[:4], 3],
        [base[:4], base[4:8], 3],
    ]
    check(f, *calls, dynamic=True)


def test_writes_through_permuted_and_reshaped_views_are_seen():
    def f(x, pool, n: int):
        x.t().add_(1)
        got = x.index_select(0, bounded(x, n))
        x.view(-1)[2] = 5
        pool[1].index_copy_(0, torch.arange(2), got[:2] * 2)
        return got * 2, pool[0].index_select(0, torch.arange(3)) + 1

    pool = torch.rand(2, 4, 3)
    check(f, [table(), pool, 6], [table() + 1, pool, 8], [table(), pool, 2], dynamic=True)
